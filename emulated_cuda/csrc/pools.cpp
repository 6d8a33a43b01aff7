// Pools of device memory: the default one of each device, and those that a program creates.
#include "pools.hpp"

#include <algorithm>
#include <memory>
#include <set>

// A pool grows by chunks and keeps them until it is trimmed. The chunk is an assumption: what
// drivers were seen to reserve for a first small allocation.
static constexpr size_t kPoolChunk = 32 * kMiB, kPoolAlignment = 512;
enum PoolAttribute { kReuseLast = 3, kThreshold = 4, kReserved, kReservedHigh, kUsed, kUsedHigh };  // the first is 1

struct Pool {
  int device;
  size_t most;  // 0: as much as the card has
  size_t used = 0, used_high = 0, reserved = 0, reserved_high = 0;
  uint64_t release_threshold = 0;
  int reuses[kReuseLast] = {1, 1, 1};
  bool destroyed = false;  // its memory is given back when nothing is allocated from it
};
// All below: hold the mutex.
static Pool* default_pool(int device) {
  static std::unique_ptr<Pool> pools[kMostDevices];
  if (!pools[device]) pools[device].reset(new Pool{device, 0});
  return pools[device].get();
}
static std::set<Pool*> created;
static Pool* chosen[kMostDevices];  // by cudaDeviceSetMemPool; null for the default one
static Pool* pool_of(int device) { return chosen[device] ? chosen[device] : default_pool(device); }
static bool is_default(Pool* pool) {
  for (int device = 0; device < device_count(); ++device)
    if (pool == default_pool(device)) return true;
  return false;
}
static bool is_pool(void* pool) { return pool && (created.count((Pool*)pool) || is_default((Pool*)pool)); }

static void trim(Pool* pool, size_t keep) {
  size_t least = round_up(std::max(pool->used, keep), kPoolChunk);
  if (least >= pool->reserved) return;
  give_bytes(pool->device, pool->reserved - least);
  pool->reserved = least;
}
static void end_if_unused(Pool* pool) {
  if (!pool->destroyed || pool->used) return;
  trim(pool, 0);
  delete pool;
}
void give_to_pool(Pool* pool, size_t size) {
  pool->used -= round_up(size, kPoolAlignment);
  end_if_unused(pool);
}
static int allocate(void** out, size_t size, Pool* pool) {
  if (size > (size_t)settings.address_bytes) return fail(kOutOfMemory);
  size_t taken = round_up(size, kPoolAlignment);
  if (pool->most && pool->used + taken > pool->most) return fail(kOutOfMemory);
  uintptr_t at = find_addresses(pool->device, round_up(size, kGranularity));
  if (!at) return fail(kOutOfMemory);
  size_t wanted = round_up(pool->used + taken, kPoolChunk);
  if (wanted > pool->reserved) {
    if (!take_bytes(pool->device, wanted - pool->reserved)) return fail(kOutOfMemory);
    pool->reserved = wanted;
    pool->reserved_high = std::max(pool->reserved_high, wanted);
  }
  pool->used += taken;
  pool->used_high = std::max(pool->used_high, pool->used);
  add_pooled_piece(at, size, pool->device, pool);
  *out = (void*)at;
  return kSuccess;
}

// ---- Allocation ----

API int cudaMallocAsync(void** out, size_t size, Stream) {
  make_driver_ready();
  *out = nullptr;
  if (!size) return kSuccess;
  std::lock_guard<std::mutex> guard(memory_mutex);
  return allocate(out, size, pool_of(current_device));
}
API int cudaMallocFromPoolAsync(void** out, size_t size, void* pool, Stream) {
  make_driver_ready();
  *out = nullptr;
  std::lock_guard<std::mutex> guard(memory_mutex);
  if (!is_pool(pool)) return fail(kInvalidValue);
  return size ? allocate(out, size, (Pool*)pool) : kSuccess;
}

// ---- Pools ----

struct PoolProperties {  // cudaMemPoolProps, CUmemPoolProps
  int allocation_type, handle_types, location_type, location;
  void* security;
  size_t most;
};
API int cudaMemPoolCreate(void** out, const PoolProperties* wanted) {
  constexpr int kPinned = 1, kDevice = 1;
  make_driver_ready();
  if (wanted->location_type != kDevice || wanted->handle_types)
    return refuse("cudaMemPoolCreate",
                  "Create a pool of device memory that is not shared with other processes, or use a GPU.");
  if (wanted->allocation_type != kPinned) return fail(kInvalidValue);
  if (!is_device(wanted->location)) return fail(kInvalidDevice);
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto pool = new Pool{wanted->location, wanted->most};
  created.insert(pool);
  return *out = pool, kSuccess;
}
API int cudaMemPoolDestroy(void* handle) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto pool = (Pool*)handle;
  if (!created.erase(pool)) return fail(kInvalidValue);  // a default one cannot be destroyed
  if (chosen[pool->device] == pool) chosen[pool->device] = nullptr;
  pool->destroyed = true;
  return end_if_unused(pool), kSuccess;
}
API int cudaDeviceGetDefaultMemPool(void** pool, int device) {
  if (!is_device(device)) return fail(kInvalidDevice);
  std::lock_guard<std::mutex> guard(memory_mutex);
  return *pool = default_pool(device), kSuccess;
}
API int cudaDeviceGetMemPool(void** pool, int device) {
  if (!is_device(device)) return fail(kInvalidDevice);
  std::lock_guard<std::mutex> guard(memory_mutex);
  return *pool = pool_of(device), kSuccess;
}
API int cudaDeviceSetMemPool(int device, void* pool) {
  if (!is_device(device)) return fail(kInvalidDevice);
  std::lock_guard<std::mutex> guard(memory_mutex);
  if (!is_pool(pool) || ((Pool*)pool)->device != device) return fail(kInvalidValue);
  return chosen[device] = (Pool*)pool, kSuccess;
}
API int cudaMemPoolTrimTo(void* pool, size_t keep) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  if (!is_pool(pool)) return fail(kInvalidValue);
  return trim((Pool*)pool, keep), kSuccess;
}
API int cudaMemPoolGetAttribute(void* handle, int which, void* value) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  if (!is_pool(handle) || which < 1 || which > kUsedHigh) return fail(kInvalidValue);
  const Pool& pool = *(Pool*)handle;
  if (which <= kReuseLast) return *(int*)value = pool.reuses[which - 1], kSuccess;
  const uint64_t values[] = {pool.release_threshold, pool.reserved, pool.reserved_high, pool.used, pool.used_high};
  return *(uint64_t*)value = values[which - kThreshold], kSuccess;
}
API int cudaMemPoolSetAttribute(void* handle, int which, void* value) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  if (!is_pool(handle) || which < 1 || which > kUsedHigh) return fail(kInvalidValue);
  Pool& pool = *(Pool*)handle;
  if (which <= kReuseLast) return pool.reuses[which - 1] = *(int*)value != 0, kSuccess;
  if (which == kThreshold) return pool.release_threshold = *(uint64_t*)value, kSuccess;
  bool is_high = which == kReservedHigh || which == kUsedHigh;
  if (!is_high || *(uint64_t*)value) return fail(kInvalidValue);  // the highest may be set to zero, and no other
  (which == kReservedHigh ? pool.reserved_high = pool.reserved : pool.used_high = pool.used);
  return kSuccess;
}
API int cudaDeviceGetGraphMemAttribute(int, int, void* value) { return *(uint64_t*)value = 0, kSuccess; }
NOTHING_TO_DO(cudaMemPoolSetAccess) NOTHING_TO_DO(cudaDeviceSetGraphMemAttribute)
