// Live figures: memory of a device, and the processes that use it.
//
// Each process has a whole card for itself (docs/how-to/programs.md). NVML adds up all of them, as it
// does on a card, so what is in use may come to more than the card has; it is then shown as full.
#include "nvml.hpp"

#include <algorithm>

struct Use {
  std::vector<unsigned> processes;
  std::vector<uint64_t> bytes;
  uint64_t used = 0;
};
static Use use_of(Device device) {
  Use use;
  int most = 64, count;
  for (;; most = count + 16) {  // others may start meanwhile
    use.processes.resize(most), use.bytes.resize(most);
    count = emulated_processes(index_of(device), use.processes.data(), use.bytes.data(), most);
    if (count <= most) break;
  }
  use.processes.resize(count), use.bytes.resize(count);
  for (uint64_t bytes : use.bytes) use.used += bytes;
  use.used = std::min<uint64_t>(use.used, emulated_settings()->total_bytes);
  return use;
}

// ---- Memory ----

struct MemoryInfo {
  unsigned long long total, free, used;
};
API int nvmlDeviceGetMemoryInfo(Device device, MemoryInfo* info) {
  if (int error = check(device, info)) return error;
  unsigned long long total = emulated_settings()->total_bytes, used = use_of(device).used;
  return *info = {total, total - used, used}, kSuccess;
}
struct MemoryInfo2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
API int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryInfo2* info) {
  if (int error = check(device, info)) return error;
  if (info->version != version_of(sizeof *info, 2)) return kNvmlWrongVersion;
  MemoryInfo found;
  nvmlDeviceGetMemoryInfo(device, &found);
  // What a driver keeps for itself is not in the total of a card here (emulated_cuda/cards.py).
  info->total = found.total, info->reserved = 0, info->free = found.free, info->used = found.used;
  return kSuccess;
}

// ---- Processes ----

constexpr unsigned kNoInstance = 0xFFFFFFFF;  // the device is not divided (MIG)
struct Process {
  unsigned process;
  unsigned long long bytes;
};
struct Process2 {
  unsigned process;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
};
struct Process3 {
  unsigned process;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
  unsigned long long protected_bytes;
};
static void put(Process& out, unsigned process, uint64_t bytes) { out = {process, bytes}; }
static void put(Process2& out, unsigned process, uint64_t bytes) {
  out = {process, bytes, kNoInstance, kNoInstance};
}
static void put(Process3& out, unsigned process, uint64_t bytes) {
  out = {process, bytes, kNoInstance, kNoInstance, 0};
}

template <class Record>
static int list(const Use& use, unsigned* count, Record* out) {
  unsigned room = out ? *count : 0, found = (unsigned)use.processes.size();
  *count = found;
  if (found > room) return kNvmlTooSmall;
  for (unsigned i = 0; i < found; ++i) put(out[i], use.processes[i], use.bytes[i]);
  return kSuccess;
}
template <class Record>
static int list_processes(Device device, unsigned* count, Record* out) {
  if (int error = check(device, count)) return error;
  return list(use_of(device), count, out);
}
API int nvmlDeviceGetComputeRunningProcesses(Device d, unsigned* n, Process* out) { return list_processes(d, n, out); }
API int nvmlDeviceGetComputeRunningProcesses_v2(Device d, unsigned* n, Process2* out) {
  return list_processes(d, n, out);
}
API int nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned* n, Process2* out) {
  return list_processes(d, n, out);
}

#define NO_PROCESS(name) \
  API int name(Device device, unsigned* count, void*) { \
    if (int error = check(device, count)) return error; \
    return *count = 0, kSuccess; \
  }
NO_PROCESS(nvmlDeviceGetGraphicsRunningProcesses) NO_PROCESS(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESS(nvmlDeviceGetGraphicsRunningProcesses_v3) NO_PROCESS(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESS(nvmlDeviceGetMPSComputeRunningProcesses_v2) NO_PROCESS(nvmlDeviceGetMPSComputeRunningProcesses_v3)

struct ProcessList {
  unsigned version, mode, count;
  Process3* processes;
};
API int nvmlDeviceGetRunningProcessDetailList(Device device, ProcessList* out) {
  enum { kCompute = 0, kAll = 3, kModes = 4 };
  if (int error = check(device, out)) return error;
  if (out->version != version_of(sizeof *out, 1)) return kNvmlWrongVersion;
  if (out->mode >= kModes) return kNvmlInvalid;
  return list(out->mode == kCompute || out->mode == kAll ? use_of(device) : Use{}, &out->count, out->processes);
}
