// The driver's virtual memory, with which torch builds expandable segments: addresses are
// reserved first, and physical memory is mapped to them piece by piece.
#include "emulated.hpp"
#include "handles.hpp"

#include <sys/mman.h>

#include <map>

struct Location {
  int type, id;
};
struct AllocationProperties {
  int type, handle_types;
  Location location;
};
constexpr int kOnDevice = 1;

struct Physical {
  size_t size;
  int device;  // -1 for memory of the host
};

static Handles physical;

API int cuMemGetAllocationGranularity(size_t* size, const AllocationProperties*, int) {
  return *size = kGranularity, kSuccess;
}

// What mmap returned and its size, by the aligned address that was handed out.
static std::map<uintptr_t, std::pair<void*, size_t>> reservations;

API int cuMemAddressReserve(DevicePointer* out, size_t size, size_t, DevicePointer, unsigned long long) {
  if (size > SIZE_MAX / 2) return kOutOfMemory;
  size_t mapped = size + kGranularity;
  void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return kOutOfMemory;
  madvise(start, mapped, MADV_DONTDUMP);
  madvise(start, mapped, MADV_NOHUGEPAGE);
  *out = round_up((uintptr_t)start, kGranularity);
  std::lock_guard<std::mutex> guard(memory_mutex);
  reservations[*out] = {start, mapped};
  add_range(*out, size);
  return kSuccess;
}
API int cuMemAddressFree(DevicePointer start, size_t) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto it = reservations.find(start);
  if (it == reservations.end()) return kInvalidValue;
  munmap(it->second.first, it->second.second);
  reservations.erase(it);
  remove_range(start);
  return kSuccess;
}
API int cuMemCreate(Physical** out, size_t size, const AllocationProperties* wanted, unsigned long long) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  int device = wanted->location.type == kOnDevice ? wanted->location.id : -1;
  if (device >= 0 && (!is_device(device) || !take_bytes(device, size))) return kOutOfMemory;
  *out = physical.add(new Physical{size, device});
  return kSuccess;
}
API int cuMemRelease(Physical* memory) {
  if (!physical.remove(memory)) return kInvalidValue;
  std::lock_guard<std::mutex> guard(memory_mutex);
  if (memory->device >= 0) give_bytes(memory->device, memory->size);
  delete memory;
  return kSuccess;
}
API int cuMemMap(DevicePointer start, size_t size, size_t, Physical* memory, unsigned long long) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  if (!physical.has(memory) || !is_in_range(start, size)) return kInvalidValue;
  add_piece(start, size, memory->device);
  return kSuccess;
}
API int cuMemUnmap(DevicePointer start, size_t size) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  if (!is_in_range(start, size)) return kInvalidValue;
  remove_pieces(start, size);
  madvise((void*)start, size, MADV_DONTNEED);
  return kSuccess;
}
NOTHING_TO_DO(cuMemSetAccess)
