// Devices: how many, their properties and attributes, the device of a thread, errors.
#include "graphs.hpp"
#include "machine.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

Settings settings;
thread_local int current_device = 0;
thread_local int last_error = kSuccess;

// Returns 0 if `size` is that of the structure that this library was compiled with.
API int emulated_configure(const Settings* wanted, size_t size) {
  if (size != sizeof settings) return kInvalidValue;
  settings = *wanted;
  return kSuccess;
}

// ---- CUDA_VISIBLE_DEVICES, which the real runtime reads when it is first asked ----

static void uuid_text(int physical, char* text, size_t size) {
  snprintf(text, size, "GPU-00000000-0000-0000-0000-%012d", physical + 1);
}

static int physical_of(const char* entry, size_t length) {
  char* end;
  long index = strtol(entry, &end, 10);
  if (end == entry + length && length) return index >= 0 && index < settings.devices ? (int)index : -1;
  for (int physical = 0; physical < settings.devices; ++physical) {
    char uuid[64];
    uuid_text(physical, uuid, sizeof uuid);
    if (length > 4 && !strncmp(uuid, entry, length)) return physical;
  }
  return -1;
}

const std::vector<int>& visible_devices() {
  static const std::vector<int> visible = [] {
    std::vector<int> found;
    const char* list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) {
      for (int physical = 0; physical < settings.devices; ++physical) found.push_back(physical);
      return found;
    }
    while (*list && (int)found.size() < settings.devices) {
      size_t length = strcspn(list, ",");
      int physical = physical_of(list, length);
      if (physical < 0) break;  // an invalid entry hides those after it
      found.push_back(physical);
      list += length + (list[length] == ',');
    }
    return found;
  }();
  return visible;
}

// ---- Called by the library for NVML, which only knows physical devices ----

API int emulated_physical_devices() { return (int)settings.devices; }
API const Settings* emulated_settings() { return &settings; }
API void emulated_uuid(int physical, char* text, size_t size) { uuid_text(physical, text, size); }

// ---- Properties ----

// Byte offsets of the fields of cudaDeviceProp that differ between CUDA 12 and CUDA 13.
struct Layout {
  size_t size, multiprocessors, can_map_host, concurrent_kernels, ecc, bus_id, copy_engines,
      unified_addressing, memory_bus, l2, threads, priorities, global_l1, local_l1, shared, registers,
      concurrent_managed, preemption, cooperative, shared_opt_in, blocks, shared_reserved,
      host_register, pools;
};
static constexpr Layout kCuda12 = {1032, 388, 400, 576, 580, 584, 600, 604, 612, 616, 624, 628,
                                   632,  636, 640, 648, 676, 680, 688, 696, 712, 720, 728, 744};
static constexpr Layout kCuda13 = {1008, 384, 392, 560, 564, 568, 584, 588, 592, 596, 604, 608,
                                   612,  616, 624, 632, 656, 660, 668, 672, 688, 696, 704, 720};

template <class T>
static void put(void* structure, size_t offset, T value) {
  memcpy((char*)structure + offset, &value, sizeof value);
}

static int fill_properties(void* properties, int device, const Layout& at) {
  make_driver_ready();
  if (!is_device(device)) return fail(kInvalidDevice);
  const Settings& card = settings;
  int physical = visible_devices()[device];
  memset(properties, 0, at.size);
  snprintf((char*)properties, sizeof card.name, "%.255s", card.name);
  char uuid[64];
  uuid_text(physical, uuid, sizeof uuid);
  put<char>(properties, 256 + 15, (char)strtol(uuid + strlen(uuid) - 2, nullptr, 16));
  put<size_t>(properties, 288, card.total_bytes);
  put<size_t>(properties, 296, card.shared_per_block);
  put<int>(properties, 304, 65536);  // registers of a block
  put<int>(properties, 308, 32);     // threads of a warp
  put<size_t>(properties, 312, 2147483647);
  put<int>(properties, 320, 1024);  // threads of a block
  for (int axis = 0; axis < 3; ++axis) {
    put<int>(properties, 324 + 4 * axis, axis == 2 ? 64 : 1024);
    put<int>(properties, 336 + 4 * axis, axis == 0 ? 2147483647 : 65535);
  }
  put<size_t>(properties, 352, 65536);  // constant memory
  put<int>(properties, 360, (int)card.major);
  put<int>(properties, 364, (int)card.minor);
  put<size_t>(properties, 368, 512);  // alignment of textures
  put<size_t>(properties, 376, 32);
  if (&at == &kCuda12) {  // clocks were dropped in CUDA 13
    put<int>(properties, 348, (int)card.clock_khz);
    put<int>(properties, 608, (int)card.memory_clock_khz);
    put<int>(properties, 384, 1);
  }
  put<int>(properties, at.multiprocessors, (int)card.multiprocessors);
  put<int>(properties, at.bus_id, physical + 1);
  put<int>(properties, at.copy_engines, 3);
  put<int>(properties, at.memory_bus, (int)card.memory_bus_bits);
  put<int>(properties, at.l2, (int)card.l2_bytes);
  put<int>(properties, at.threads, (int)card.threads_per_multiprocessor);
  put<size_t>(properties, at.shared, card.shared_per_multiprocessor);
  put<int>(properties, at.registers, 65536);
  put<size_t>(properties, at.shared_opt_in, card.shared_per_block_opt_in);
  put<int>(properties, at.blocks, (int)card.blocks_per_multiprocessor);
  put<size_t>(properties, at.shared_reserved, kKiB);
  for (size_t supported :
       {at.can_map_host, at.concurrent_kernels, at.ecc, at.unified_addressing, at.priorities,
        at.global_l1, at.local_l1, at.preemption, at.cooperative, at.host_register, at.pools})
    put<int>(properties, supported, 1);
  return kSuccess;
}
// CUDA 12 gave the function a new name when it changed the structure; CUDA 13 took the old one.
API int cudaGetDeviceProperties_v2(void* p, int d) { return fill_properties(p, d, kCuda12); }
API int cudaGetDeviceProperties(void* p, int d) { return fill_properties(p, d, kCuda13); }

static int attribute(int which, int device) {
  const Settings& card = settings;
  const std::pair<int, int64_t> values[] = {
      {1, 1024}, {2, 1024}, {3, 1024}, {4, 64},                  // a block's threads and dimensions
      {5, 2147483647}, {6, 65535}, {7, 65535},                   // a grid's dimensions
      {8, card.shared_per_block}, {9, 65536}, {10, 32}, {11, 2147483647}, {12, 65536},
      {13, card.clock_khz}, {14, 512}, {15, 1}, {16, card.multiprocessors},
      {19, 1}, {31, 1},                                          // mapped host memory, concurrent kernels
      {33, visible_devices()[device] + 1},                       // the PCI bus
      {36, card.memory_clock_khz}, {37, card.memory_bus_bits}, {38, card.l2_bytes},
      {39, card.threads_per_multiprocessor}, {40, 3}, {41, 1}, {51, 32},
      {75, card.major}, {76, card.minor}, {78, 1}, {79, 1}, {80, 1},
      {81, card.shared_per_multiprocessor}, {82, 65536}, {87, card.minor ? 64 : 2}, {90, 1}, {95, 1},
      {97, card.shared_per_block_opt_in}, {99, 1}, {106, card.blocks_per_multiprocessor},
      {102, 1},                                                  // virtual memory management
      {111, (int64_t)kKiB}, {115, 1},                            // reserved shared memory, memory pools
  };
  for (auto& [key, value] : values)
    if (key == which) return (int)value;
  return 0;  // not supported by this card
}
API int cudaDeviceGetAttribute(int* value, int which, int device) {
  make_driver_ready();
  if (!is_device(device)) return fail(kInvalidDevice);
  *value = attribute(which, device);
  return kSuccess;
}

// ---- The device of a thread ----

API int cudaGetDeviceCount(int* count) {
  make_driver_ready();
  *count = device_count();
  return *count ? kSuccess : fail(kNoDevice);
}
API int cudaGetDevice(int* device) { return make_driver_ready(), *device = current_device, kSuccess; }
API int cudaSetDevice(int device) {
  make_driver_ready();
  if (!is_device(device)) return fail(kInvalidDevice);
  current_device = device;
  return kSuccess;
}
API int cudaDriverGetVersion(int* version) { return *version = (int)settings.cuda_version, kSuccess; }
API int cudaRuntimeGetVersion(int* version) { return *version = (int)settings.cuda_version, kSuccess; }
API int cudaDeviceCanAccessPeer(int* can, int a, int b) { return *can = a != b, kSuccess; }
NOTHING_TO_DO(cudaDeviceEnablePeerAccess) NOTHING_TO_DO(cudaDeviceDisablePeerAccess)
API int cudaInitDevice(int device, unsigned, unsigned) {
  make_driver_ready();
  return is_device(device) ? kSuccess : fail(kInvalidDevice);
}
API int cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (!is_device(device)) return fail(kInvalidDevice);
  snprintf(text, size, "0000:%02X:00.0", visible_devices()[device] + 1);
  return kSuccess;
}
API int cudaDeviceGetByPCIBusId(int* device, const char* text) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2) return fail(kInvalidValue);
  for (*device = 0; *device < device_count(); ++*device)
    if (visible_devices()[*device] + 1 == (int)bus) return kSuccess;
  return fail(kInvalidDevice);
}

// ---- Errors ----

API int cudaGetLastError() { return std::exchange(last_error, (int)kSuccess); }
API int cudaPeekAtLastError() { return last_error; }
static std::pair<const char*, const char*> error_texts(int error) {
  switch (error) {
    case kSuccess: return {"cudaSuccess", "no error"};
    case kInvalidValue: return {"cudaErrorInvalidValue", "invalid argument"};
    case kOutOfMemory: {
      const char* problem = problem_of_machine();
      return {"cudaErrorMemoryAllocation", problem ? problem : "out of memory"};
    }
    case kInvalidConfiguration: return {"cudaErrorInvalidConfiguration", "invalid configuration argument"};
    case kNoDevice: return {"cudaErrorNoDevice", "no CUDA-capable device is detected"};
    case kInvalidDevice: return {"cudaErrorInvalidDevice", "invalid device ordinal"};
    case kInvalidHandle: return {"cudaErrorInvalidResourceHandle", "invalid resource handle"};
    case kOperatingSystem: return {"cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"};
    case kNotFound: return {"cudaErrorSymbolNotFound", "named symbol not found"};
    case kNotReady: return {"cudaErrorNotReady", "device not ready"};
    case kIllegalAddress: return {"cudaErrorIllegalAddress", refusal_text()};
    case kLaunchTimeout: return {"cudaErrorLaunchTimeout", refusal_text()};
    case kAssert: return {"cudaErrorAssert", refusal_text()};
    case kHostMemoryAlreadyRegistered:
      return {"cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"};
    case kHostMemoryNotRegistered:
      return {"cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"};
    case kMisalignedAddress: return {"cudaErrorMisalignedAddress", refusal_text()};
    case kLaunchFailed: return {"cudaErrorLaunchFailure", refusal_text()};
    case kNotSupported: return {"cudaErrorNotSupported", refusal_text()};
    case kIllegalState: return {"cudaErrorIllegalState", "the operation cannot be performed in the present state"};
    case kCaptureUnsupported:
      return {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"};
    case kCaptureInvalidated: return {"cudaErrorStreamCaptureInvalidated", invalid_capture_text()};
    case kCaptureUnmatched:
      return {"cudaErrorStreamCaptureUnmatched", "capture was not initiated in this stream"};
    case kCaptureUnjoined: return {"cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"};
    default: return {"cudaErrorUnknown", "an error that the emulated device does not return"};
  }
}
API const char* cudaGetErrorName(int error) { return error_texts(error).first; }
API const char* cudaGetErrorString(int error) { return error_texts(error).second; }
