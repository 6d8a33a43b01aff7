// NVML, as far as torch and pynvml ask. A library of its own, because they look for libnvidia-ml.so.1.
// It counts physical devices, because NVML ignores CUDA_VISIBLE_DEVICES.
#include "emulated.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstring>

extern "C" int emulated_physical_devices();
extern "C" const Settings* emulated_settings();
extern "C" void emulated_uuid(int physical, char* text, size_t size);
extern "C" size_t emulated_bytes_in_use(int physical);

enum : int { kNvmlInvalid = 2, kNvmlNotSupported = 3, kNvmlNotFound = 6, kNvmlTooSmall = 7 };

static char devices[kMostDevices];  // their addresses are the handles
static int index_of(void* device) { return (int)((char*)device - devices); }
static int handle(long index, void** out) {
  if (index < 0 || index >= emulated_physical_devices()) return kNvmlNotFound;
  return *out = &devices[index], kSuccess;
}

NOTHING_TO_DO(nvmlInit) NOTHING_TO_DO(nvmlInit_v2) NOTHING_TO_DO(nvmlInitWithFlags) NOTHING_TO_DO(nvmlShutdown)
API const char* nvmlErrorString(int error) {
  return error == kNvmlNotSupported ? "not supported by the emulated device" : error ? "no such emulated device" : "success";
}
API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return *version = (int)emulated_settings()->cuda_version, kSuccess;
}
API int nvmlDeviceGetCount_v2(unsigned* count) { return *count = emulated_physical_devices(), kSuccess; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { return handle(index, device); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  unsigned domain, bus;
  return sscanf(id, "%x:%x", &domain, &bus) == 2 ? handle((long)bus - 1, device) : kNvmlInvalid;
}
API int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  return emulated_uuid(index_of(device), text, size), kSuccess;
}
API int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  for (int index = 0; index < emulated_physical_devices(); ++index) {
    char text[64];
    emulated_uuid(index, text, sizeof text);
    if (!strcmp(text, uuid)) return handle(index, device);
  }
  return kNvmlNotFound;
}
API int nvmlDeviceGetName(void*, char* text, unsigned size) {
  return snprintf(text, size, "%s", emulated_settings()->name), kSuccess;
}

// ---- Memory ----

struct MemoryInfo {
  unsigned long long total, free, used;
};
API int nvmlDeviceGetMemoryInfo(void* device, MemoryInfo* info) {
  unsigned long long total = emulated_settings()->total_bytes, used = emulated_bytes_in_use(index_of(device));
  return *info = {total, total - used, used}, kSuccess;
}
struct Process {
  unsigned pid;
  unsigned long long used;
};
struct Process2 {
  Process process;
  unsigned gpu_instance, compute_instance;
};
template <class Record>
static int processes(void* device, unsigned* count, Record* out) {
  bool has_room = *count >= 1 && out;
  *count = 1;
  if (!has_room) return kNvmlTooSmall;
  memset(out, 0, sizeof *out);
  *(Process*)out = {(unsigned)getpid(), emulated_bytes_in_use(index_of(device))};
  return kSuccess;
}
API int nvmlDeviceGetComputeRunningProcesses(void* d, unsigned* n, Process* out) { return processes(d, n, out); }
API int nvmlDeviceGetComputeRunningProcesses_v3(void* d, unsigned* n, Process2* out) { return processes(d, n, out); }

// ---- What this device does not have ----

API int nvmlDeviceGetGpuFabricInfoV(void*, unsigned char* info) {
  constexpr size_t kState = 28;
  return info[kState] = 0, kSuccess;  // no fabric; torch would warn if this call failed
}
API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNvmlNotSupported; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNvmlNotSupported; }
