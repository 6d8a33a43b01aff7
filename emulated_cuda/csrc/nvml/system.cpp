// NVML as a whole: its start, errors and versions, and how a device is found.
#include "nvml.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

char handles[kMostDevices];
static std::atomic<int> initialized{0};
bool is_initialized() { return initialized > 0; }

int check(Device device, const void* out) {
  if (!is_initialized()) return kNvmlUninitialized;
  bool is_one = (char*)device >= handles && index_of(device) < emulated_physical_devices();
  return is_one && out ? kSuccess : kNvmlInvalid;
}
static int check_system(const void* out) {
  return !is_initialized() ? kNvmlUninitialized : out ? kSuccess : kNvmlInvalid;
}
int put_text(char* text, unsigned size, const char* value) {
  return snprintf(text, size, "%s", value) < (int)size ? kSuccess : kNvmlTooSmall;
}

// ---- Start and errors ----

API int nvmlInitWithFlags(unsigned) { return ++initialized, kSuccess; }
API int nvmlInit_v2() { return nvmlInitWithFlags(0); }
API int nvmlInit() { return nvmlInitWithFlags(0); }
API int nvmlShutdown() {
  int before = initialized;
  while (before && !initialized.compare_exchange_weak(before, before - 1)) {
  }
  return before ? kSuccess : kNvmlUninitialized;
}
API const char* nvmlErrorString(int error) {
  switch (error) {
    case kSuccess: return "Success";
    case kNvmlUninitialized: return "Uninitialized";
    case kNvmlInvalid: return "Invalid Argument";
    case kNvmlNotSupported: return "Not Supported";
    case kNvmlNotFound: return "Not Found";
    case kNvmlTooSmall: return "Insufficient Size";
    case kNvmlWrongVersion: return "Argument Version Mismatch";
    default: return "Unknown Error";
  }
}

// ---- Versions ----

// The release of the driver that came with a version of CUDA; the zeros of its version are made up.
static int driver_release() {
  int cuda = (int)emulated_settings()->cuda_version;
  if (cuda < 12060) return 550;
  if (cuda < 12080) return 560;
  if (cuda < 12090) return 570;
  if (cuda < 13000) return 575;
  if (cuda < 13010) return 580;
  return cuda < 13020 ? 590 : 595;
}
API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  if (int error = check_system(version)) return error;
  return *version = (int)emulated_settings()->cuda_version, kSuccess;
}
API int nvmlSystemGetCudaDriverVersion(int* version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
API int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  if (int error = check_system(text)) return error;
  char version[32];
  snprintf(version, sizeof version, "%d.00.00", driver_release());
  return put_text(text, size, version);
}
API int nvmlSystemGetNVMLVersion(char* text, unsigned size) {
  if (int error = check_system(text)) return error;
  char version[32];
  snprintf(version, sizeof version, "%d.%d.00.00", (int)emulated_settings()->cuda_version / 1000, driver_release());
  return put_text(text, size, version);
}
struct DriverBranch {
  unsigned version;
  char branch[80];
};
API int nvmlSystemGetDriverBranch(DriverBranch* out, unsigned size) {
  if (int error = check_system(out)) return error;
  if (out->version != version_of(sizeof *out, 1)) return kNvmlWrongVersion;
  char branch[32];
  snprintf(branch, sizeof branch, "r%d_00", driver_release());
  return put_text(out->branch, size < sizeof out->branch ? size : sizeof out->branch, branch);
}
API int nvmlSystemGetProcessName(unsigned process, char* text, unsigned size) {
  if (int error = check_system(text)) return error;
  char path[64], name[4096];
  snprintf(path, sizeof path, "/proc/%u/cmdline", process);
  FILE* file = fopen(path, "re");
  if (!file) return kNvmlNotFound;
  size_t length = fread(name, 1, sizeof name - 1, file);
  fclose(file);
  name[length] = 0;  // the first argument ends with a zero
  snprintf(text, size, "%s", name);
  return kSuccess;
}

// ---- What a machine with cards does not need to have ----

static int none(unsigned* count) {
  if (int error = check_system(count)) return error;
  return *count = 0, kSuccess;
}
API int nvmlUnitGetCount(unsigned* count) { return none(count); }
API int nvmlGetExcludedDeviceCount(unsigned* count) { return none(count); }
API int nvmlSystemGetHicVersion(unsigned* count, void*) { return none(count); }

// ---- Devices ----

static int handle(long index, Device* out) {
  if (int error = check_system(out)) return error;
  if (index < 0 || index >= emulated_physical_devices()) return kNvmlNotFound;
  return *out = &handles[index], kSuccess;
}
API int nvmlDeviceGetCount_v2(unsigned* count) {
  if (int error = check_system(count)) return error;
  return *count = emulated_physical_devices(), kSuccess;
}
API int nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  int error = handle(index, device);
  return error == kNvmlNotFound ? kNvmlInvalid : error;  // as NVML does
}
API int nvmlDeviceGetHandleByIndex(unsigned index, Device* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char* id, Device* device) {
  unsigned domain, bus;
  if (!id || sscanf(id, "%x:%x", &domain, &bus) != 2) return kNvmlInvalid;
  return handle(domain ? -1 : (long)bus - 1, device);
}
API int nvmlDeviceGetHandleByPciBusId(const char* id, Device* device) {
  return nvmlDeviceGetHandleByPciBusId_v2(id, device);
}
API int nvmlDeviceGetHandleByUUID(const char* uuid, Device* device) {
  if (!uuid) return kNvmlInvalid;
  for (int index = 0; index < emulated_physical_devices(); ++index) {
    char text[64];
    emulated_uuid(index, text, sizeof text);
    if (!strcmp(text, uuid)) return handle(index, device);
  }
  return handle(-1, device);
}
struct Uuid {
  unsigned version, type;
  unsigned char value[41];
};
API int nvmlDeviceGetHandleByUUIDV(const Uuid* uuid, Device* device) {
  enum { kText = 1, kBinary = 2 };
  if (!uuid) return kNvmlInvalid;
  if (uuid->version != version_of(sizeof *uuid, 1)) return kNvmlWrongVersion;
  char text[64];
  if (uuid->type == kBinary) {
    char* at = text + snprintf(text, sizeof text, "GPU-");
    for (int i = 0; i < 16; ++i) at += snprintf(at, 4, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid->value[i]);
  } else if (uuid->type == kText) {
    snprintf(text, sizeof text, "%.41s", (const char*)uuid->value);
  } else {
    return kNvmlInvalid;
  }
  return nvmlDeviceGetHandleByUUID(text, device);
}
NUMBER(nvmlDeviceGetIndex, unsigned, index_of(device))
NUMBER(nvmlDeviceGetMinorNumber, unsigned, index_of(device))
API int nvmlDeviceGetUUID(Device device, char* text, unsigned size) {
  if (int error = check(device, text)) return error;
  char uuid[64];
  emulated_uuid(index_of(device), uuid, sizeof uuid);
  return put_text(text, size, uuid);
}
