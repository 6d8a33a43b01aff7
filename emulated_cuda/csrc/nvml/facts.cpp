// Fixed facts of a card, which follow from its row in emulated_cuda/cards.py.
#include "nvml.hpp"

#include <sched.h>

#include <cstdio>
#include <cstring>

// ---- Kind ----

API int nvmlDeviceGetName(Device device, char* text, unsigned size) {
  if (int error = check(device, text)) return error;
  return put_text(text, size, emulated_settings()->name);
}
static int brand() {
  enum { kTesla = 2, kGeForce = 5, kNvidia = 14 };
  const char* name = emulated_settings()->name;
  return strstr(name, "GeForce") ? kGeForce : strstr(name, "Tesla") ? kTesla : kNvidia;
}
static unsigned architecture() {
  enum { kVolta = 5, kTuring, kAmpere, kAda, kHopper, kBlackwell };
  if (is_capable(10)) return kBlackwell;
  if (is_capable(9)) return kHopper;
  if (is_capable(8, 9)) return kAda;
  if (is_capable(8)) return kAmpere;
  return is_capable(7, 5) ? kTuring : kVolta;
}
NUMBER(nvmlDeviceGetBrand, int, brand())
NUMBER(nvmlDeviceGetArchitecture, unsigned, architecture())
API int nvmlDeviceGetCudaComputeCapability(Device device, int* major, int* minor) {
  if (int error = check(device, major)) return error;
  if (!minor) return kNvmlInvalid;
  return *major = (int)emulated_settings()->major, *minor = (int)emulated_settings()->minor, kSuccess;
}
NUMBER(nvmlDeviceGetNumGpuCores, unsigned, emulated_settings()->multiprocessors * (is_capable(8, 6) ? 128 : 64))
NUMBER(nvmlDeviceGetMemoryBusWidth, unsigned, emulated_settings()->memory_bus_bits)
NUMBER(nvmlDeviceGetMultiGpuBoard, unsigned, 0)
NUMBER(nvmlDeviceGetBoardId, unsigned, (index_of(device) + 1) << 8)
NUMBER(nvmlDeviceIsMigDeviceHandle, unsigned, 0)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, 0)
NUMBER(nvmlDeviceGetVirtualizationMode, int, 0)

// ---- PCI ----

constexpr unsigned kVendor = 0x10DE;
static unsigned pci_number() { return (unsigned)emulated_settings()->pci_device << 16 | kVendor; }

struct PciInfo {
  char old_bus_id[16];
  unsigned domain, bus, device, kind, subsystem;
  char bus_id[32];  // reserved before version 3
};
struct PciInfoExt {
  unsigned version, domain, bus, device, kind, subsystem, base_class, sub_class;
  char bus_id[32];
};
static int pci_info(Device device, PciInfo* out, bool is_old) {
  if (int error = check(device, out)) return error;
  unsigned bus = (unsigned)index_of(device) + 1;
  // The number of the board's maker is not known. Before version 3 four reserved numbers follow it.
  memset(out, 0, is_old ? 16 + 9 * sizeof(unsigned) : sizeof *out);
  out->bus = bus, out->kind = pci_number();
  snprintf(out->old_bus_id, sizeof out->old_bus_id, "0000:%02X:00.0", bus);
  if (!is_old) snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", bus);
  return kSuccess;
}
API int nvmlDeviceGetPciInfo(Device device, PciInfo* out) { return pci_info(device, out, true); }
API int nvmlDeviceGetPciInfo_v2(Device device, PciInfo* out) { return pci_info(device, out, true); }
API int nvmlDeviceGetPciInfo_v3(Device device, PciInfo* out) { return pci_info(device, out, false); }
API int nvmlDeviceGetPciInfoExt(Device device, PciInfoExt* out) {
  constexpr unsigned kDisplay = 3, kVga = 0, kController3d = 2;
  if (int error = check(device, out)) return error;
  if (out->version != version_of(sizeof *out, 1)) return kNvmlWrongVersion;
  PciInfo found;
  nvmlDeviceGetPciInfo_v3(device, &found);
  *out = {out->version, 0, found.bus, 0, found.kind, 0, kDisplay, has_ecc() ? kController3d : kVga, {}};
  memcpy(out->bus_id, found.bus_id, sizeof out->bus_id);
  return kSuccess;
}
static unsigned generation() { return is_capable(9) ? 5 : is_capable(8) ? 4 : 3; }
static const unsigned kSpeeds[] = {2500, 5000, 8000, 16000, 32000};  // of a lane, in Mbit/s
NUMBER(nvmlDeviceGetBusType, unsigned, 2)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, generation())
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, generation())
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, generation())
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 16)
NUMBER(nvmlDeviceGetPcieLinkMaxSpeed, unsigned, generation())  // numbered as the generations
NUMBER(nvmlDeviceGetPcieSpeed, unsigned, kSpeeds[generation() - 1])

// ---- Clocks, which a card reaches at most ----

enum Clock { kGraphics = 0, kMultiprocessors = 1, kMemory = 2, kVideo = 3, kClocks = 4 };
API int nvmlDeviceGetMaxClockInfo(Device device, int which, unsigned* mhz) {
  if (int error = check(device, mhz)) return error;
  if (which < 0 || which >= kClocks) return kNvmlInvalid;
  if (which == kVideo) return kNvmlNotSupported;  // not in the table of cards
  const Settings& card = *emulated_settings();
  return *mhz = (unsigned)((which == kMemory ? card.memory_clock_khz : card.clock_khz) / 1000), kSuccess;
}
API int nvmlDeviceGetMaxCustomerBoostClock(Device d, int which, unsigned* mhz) {
  return nvmlDeviceGetMaxClockInfo(d, which, mhz);
}
API int nvmlDeviceGetApplicationsClock(Device d, int which, unsigned* mhz) {
  return nvmlDeviceGetMaxClockInfo(d, which, mhz);
}
API int nvmlDeviceGetDefaultApplicationsClock(Device d, int which, unsigned* mhz) {
  return nvmlDeviceGetMaxClockInfo(d, which, mhz);
}
static int one_clock(Device device, int which, unsigned* count, unsigned* mhz) {
  if (int error = check(device, count)) return error;
  bool has_room = mhz && *count >= 1;
  *count = 1;
  return has_room ? nvmlDeviceGetMaxClockInfo(device, which, mhz) : kNvmlTooSmall;
}
API int nvmlDeviceGetSupportedMemoryClocks(Device d, unsigned* count, unsigned* mhz) {
  return one_clock(d, kMemory, count, mhz);
}
API int nvmlDeviceGetSupportedGraphicsClocks(Device d, unsigned memory_mhz, unsigned* count, unsigned* mhz) {
  if (check(d) == kSuccess && memory_mhz != emulated_settings()->memory_clock_khz / 1000) return kNvmlNotFound;
  return one_clock(d, kGraphics, count, mhz);
}
API int nvmlDeviceGetSupportedPerformanceStates(Device device, unsigned* states, unsigned size) {
  constexpr unsigned kUnknown = 32;
  if (int error = check(device, states)) return error;
  for (unsigned i = 0; i < size / sizeof *states; ++i) states[i] = i ? kUnknown : 0;
  return kSuccess;
}

// ---- Limits of power: they cannot be changed, so the least and the most are the limit ----

static unsigned limit_mw() { return (unsigned)emulated_settings()->power_watts * 1000; }
NUMBER(nvmlDeviceGetPowerManagementMode, int, 1)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, limit_mw())
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, limit_mw())
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, limit_mw())
NUMBER(nvmlDeviceGetPowerSource, unsigned, 0)
API int nvmlDeviceGetPowerManagementLimitConstraints(Device device, unsigned* least, unsigned* most) {
  if (int error = check(device, least)) return error;
  if (!most) return kNvmlInvalid;
  return *least = *most = limit_mw(), kSuccess;
}

// ---- Modes ----

NUMBER(nvmlDeviceGetPersistenceMode, int, 0)
NUMBER(nvmlDeviceGetComputeMode, int, 0)
NUMBER(nvmlDeviceGetDisplayMode, int, 0)
NUMBER(nvmlDeviceGetDisplayActive, int, 0)
NUMBER(nvmlDeviceGetAccountingMode, int, 0)
NUMBER(nvmlDeviceGetSupportedEventTypes, unsigned long long, 0)
NUMBER_IF(has_ecc(), nvmlDeviceGetDefaultEccMode, int, 1)
static int both(Device device, unsigned* now, unsigned* pending, bool is_supported, unsigned value) {
  if (int error = check(device, now)) return error;
  if (!pending) return kNvmlInvalid;
  if (!is_supported) return kNvmlNotSupported;
  return *now = *pending = value, kSuccess;
}
API int nvmlDeviceGetEccMode(Device d, unsigned* now, unsigned* pending) { return both(d, now, pending, has_ecc(), 1); }
API int nvmlDeviceGetMigMode(Device d, unsigned* now, unsigned* pending) {
  bool can_be_divided = emulated_settings()->major == 9 || (emulated_settings()->major == 8 && !emulated_settings()->minor);
  return both(d, now, pending, can_be_divided, 0);
}
struct GpmSupport {
  unsigned version, is_supported;
};
API int nvmlGpmQueryDeviceSupport(Device device, GpmSupport* out) {
  if (int error = check(device, out)) return error;
  if (out->version != 1) return kNvmlWrongVersion;
  return out->is_supported = 0, kSuccess;
}

// ---- Connections ----

API int nvmlDeviceGetP2PStatus(Device a, Device b, int which, int* status) {
  enum { kRead, kWrite, kOk = 0, kNotSupportedHere = 5 };
  if (int error = check(a, status)) return error;
  if (int error = check(b)) return error;
  return *status = which == kRead || which == kWrite ? kOk : kNotSupportedHere, kSuccess;
}
API int nvmlDeviceGetTopologyCommonAncestor(Device a, Device b, int* level) {
  constexpr int kInternal = 0, kNode = 40;
  if (int error = check(a, level)) return error;
  if (int error = check(b)) return error;
  return *level = a == b ? kInternal : kNode, kSuccess;
}
API int nvmlDeviceOnSameBoard(Device a, Device b, int* is_same) {
  if (int error = check(a, is_same)) return error;
  if (int error = check(b)) return error;
  return *is_same = a == b, kSuccess;
}
// The CPUs of this process: programs bind themselves to the answer.
API int nvmlDeviceGetCpuAffinity(Device device, unsigned words, unsigned long* cpus) {
  if (int error = check(device, cpus)) return error;
  cpu_set_t own;
  if (sched_getaffinity(0, sizeof own, &own)) return kNvmlNotSupported;
  memset(cpus, 0, words * sizeof *cpus);
  constexpr unsigned kBits = 8 * sizeof *cpus;
  for (unsigned cpu = 0; cpu < CPU_SETSIZE && cpu < words * kBits; ++cpu)
    if (CPU_ISSET(cpu, &own)) cpus[cpu / kBits] |= 1ul << cpu % kBits;
  return kSuccess;
}
API int nvmlDeviceGetCpuAffinityWithinScope(Device device, unsigned words, unsigned long* cpus, unsigned) {
  return nvmlDeviceGetCpuAffinity(device, words, cpus);
}
// torch would warn if this call failed. There is no fabric.
API int nvmlDeviceGetGpuFabricInfoV(Device device, unsigned char* info) {
  constexpr size_t kState = 28;
  if (int error = check(device, info)) return error;
  return info[kState] = 0, kSuccess;
}
API int nvmlDeviceGetGpuFabricInfo(Device device, unsigned char* info) {
  constexpr size_t kSize = 28;
  if (int error = check(device, info)) return error;
  return memset(info, 0, kSize), kSuccess;
}
