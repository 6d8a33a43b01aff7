// Entry points of the driver, libcuda.so.1, that no other file has. This library is linked under that
// name, so that torch, NVRTC's loader and Triton find it when they look for the driver.
#include "emulated.hpp"

#include <dlfcn.h>

#include <cstdio>

API int cuInit(unsigned) { return device_count() ? kSuccess : kNoDevice; }
API int cuDriverGetVersion(int* version) { return *version = (int)settings.cuda_version, kSuccess; }
API int cuDeviceGetCount(int* count) { return *count = device_count(), kSuccess; }
API int cuDeviceGet(int* device, int index) {
  if (!is_device(index)) return kInvalidDevice;
  return *device = index, kSuccess;
}
API int cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "%s", settings.name), kSuccess; }
API int cuDeviceTotalMem_v2(size_t* size, int) { return *size = settings.total_bytes, kSuccess; }
extern "C" int cudaDeviceGetAttribute(int* value, int which, int device);
API int cuDeviceGetAttribute(int* value, int which, int device) {  // numbered as the runtime's
  return cudaDeviceGetAttribute(value, which, device);
}

// ---- Contexts: one per device ----

static int contexts[kMostDevices];
static int context(void** out, int device) { return *out = &contexts[device], kSuccess; }
API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  // torch switches to a device for the length of an operation only if it has a context there
  std::lock_guard<std::mutex> guard(memory_mutex);
  *flags = 0;
  *active = device == 0 || bytes_in_use(device) > (size_t)settings.context_bytes;
  return kSuccess;
}
API int cuDevicePrimaryCtxRetain(void** out, int device) {
  if (!is_device(device)) return kInvalidDevice;
  return context(out, device);
}
API int cuCtxGetCurrent(void** out) { return context(out, current_device); }
API int cuCtxGetDevice(int* device) { return *device = current_device, kSuccess; }
API int cuCtxSetCurrent(void* wanted) {
  if (wanted) current_device = (int)((int*)wanted - contexts);
  return kSuccess;
}
API int cuCtxPopCurrent(void** out) { return context(out, current_device); }
API int cuStreamGetCtx(Stream, void** out) { return context(out, current_device); }
API int cuCtxGetLimit(size_t* value, int) { return *value = kMiB, kSuccess; }
API int cuLogsRegisterCallback(void*, void*, void** handle) {
  if (handle) *handle = contexts;
  return kSuccess;
}
NOTHING_TO_DO(cuDevicePrimaryCtxRelease_v2) NOTHING_TO_DO(cuCtxPushCurrent) NOTHING_TO_DO(cuCtxSetLimit)
NOTHING_TO_DO(cuLogsUnregisterCallback)
// NVIDIA's own libraries ask for private interfaces here, and do without if there are none.
API int cuGetExportTable(const void** table, const void*) {
  if (table) *table = nullptr;
  return kNotFound;
}

// ---- Finding functions by name ----

static int entry_point(const char* name, void** function, int* result) {
  static void* self = [] {
    Dl_info info;
    return dladdr((void*)&entry_point, &info) ? dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY) : nullptr;
  }();
  *function = self ? dlsym(self, name) : nullptr;
  if (result) *result = *function ? 0 : 1;  // symbol not found
  return kSuccess;
}
API int cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, int* result) {
  return entry_point(name, function, result);
}
API int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int* result) {
  return entry_point(name, function, result);
}
