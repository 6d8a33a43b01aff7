// Entry points of the driver, libcuda.so.1, that no other file has. This library is linked under that
// name, so that torch, NVRTC's loader and Triton find it when they look for the driver.
#include "emulated.hpp"

#include <cstdio>
#include <cstring>

std::atomic<bool> driver_is_ready{false};
API int cuInit(unsigned) { return device_count() ? (make_driver_ready(), kSuccess) : kNoDevice; }
API int cuDriverGetVersion(int* version) { return *version = (int)settings.cuda_version, kSuccess; }
API int cuDeviceGetCount(int* count) {
  return driver_is_ready ? (*count = device_count(), kSuccess) : kNotInitialized;
}
API int cuDeviceGet(int* device, int index) {
  if (int error = check_device(index)) return error;
  return *device = index, kSuccess;
}
API int cuDeviceGetName(char* name, int size, int device) {
  if (int error = check_device(device)) return error;
  return snprintf(name, size, "%s", settings.name), kSuccess;
}
API int cuDeviceTotalMem_v2(size_t* size, int device) {
  if (int error = check_device(device)) return error;
  return *size = settings.total_bytes, kSuccess;
}
extern "C" int cudaDeviceGetAttribute(int* value, int which, int device);
API int cuDeviceGetAttribute(int* value, int which, int device) {  // numbered as the runtime's
  KeepLastError keep;
  if (!driver_is_ready) return kNotInitialized;
  return cudaDeviceGetAttribute(value, which, device);
}

API int cuDeviceGetUuid_v2(char* uuid, int device) {
  if (int error = check_device(device)) return error;
  memset(uuid, 0, 16);
  return uuid[15] = (char)(visible_devices()[device] + 1), kSuccess;
}
API int cuDeviceGetUuid(char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
extern "C" int cudaDeviceGetPCIBusId(char* text, int size, int device);
extern "C" int cudaDeviceGetByPCIBusId(int* device, const char* text);
API int cuDeviceGetPCIBusId(char* text, int size, int device) {
  KeepLastError keep;
  return cudaDeviceGetPCIBusId(text, size, device);
}
API int cuDeviceGetByPCIBusId(int* device, const char* text) {
  KeepLastError keep;
  return cudaDeviceGetByPCIBusId(device, text);
}
API int cuDeviceComputeCapability(int* major, int* minor, int device) {
  if (int error = check_device(device)) return error;
  return *major = (int)settings.major, *minor = (int)settings.minor, kSuccess;
}
API int cuDeviceCanAccessPeer(int* can, int a, int b) { return *can = a != b, kSuccess; }
API int cuDeviceGetP2PAttribute(int* value, int which, int a, int b) {
  constexpr int kAccess = 2, kAtomics = 3;
  if (!is_device(a) || !is_device(b) || a == b) return kInvalidDevice;
  return *value = which == kAccess || which == kAtomics, kSuccess;
}
API int cuDeviceGetExecAffinitySupport(int* is_supported, int, int) { return *is_supported = 0, kSuccess; }

// ---- Errors ----

API int cuGetErrorName(int error, const char** text) { return driver_error_texts(error, text, nullptr); }
API int cuGetErrorString(int error, const char** text) { return driver_error_texts(error, nullptr, text); }

API int cuLogsRegisterCallback(void*, void*, void** handle) {
  static int placeholder;
  if (handle) *handle = &placeholder;
  return kSuccess;
}
NOTHING_TO_DO(cuLogsUnregisterCallback) NOTHING_TO_DO(cuProfilerStart) NOTHING_TO_DO(cuProfilerStop)
