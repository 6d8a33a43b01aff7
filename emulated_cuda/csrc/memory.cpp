// Memory of devices, pinned memory of the host, and pools (cudaMallocAsync).
//
// Device memory is host memory, reserved and only committed when it is written. Kernels write
// nothing, so hardly any is unless values are computed.
#include "pending.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

std::mutex memory_mutex;

struct Piece {
  size_t size;
  int device;
  bool pooled;
};
static std::map<uintptr_t, Piece> device_pieces, host_pieces;
static std::map<uintptr_t, size_t> ranges;  // start and size
static size_t in_use[kMostDevices];         // beside the context

// ---- Accounting ----

struct Figures {  // `_FIGURES` in loading/records.py; the file outlives a process that is killed
  uint64_t most_bytes, missing_bytes;
};
static Figures own_figures[kMostDevices];
static Figures* figures = own_figures;

bool take_bytes(int device, size_t bytes) {
  size_t wanted = in_use[device] + bytes, usable = settings.total_bytes - settings.context_bytes;
  if (wanted > usable) {
    figures[device].missing_bytes = wanted - usable;
    return false;
  }
  in_use[device] = wanted;
  note_in_use(device, true);
  figures[device].most_bytes = std::max<uint64_t>(figures[device].most_bytes, wanted);
  return true;
}
// A forked process begins with figures of its own; it has used no device.
API int emulated_keep_figures_in(const char* path) {
  int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return errno;
  void* start = ftruncate(file, sizeof own_figures)
                    ? MAP_FAILED
                    : mmap(nullptr, sizeof own_figures, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  int error = start == MAP_FAILED ? errno : 0;
  close(file);
  if (error) return error;
  std::lock_guard<std::mutex> guard(memory_mutex);
  figures = (Figures*)start;
  return 0;
}
void give_bytes(int device, size_t bytes) {
  in_use[device] -= bytes;
  note_in_use(device, false);
}
size_t bytes_in_use(int device) { return in_use[device] + settings.context_bytes; }

void add_range(uintptr_t start, size_t size) { ranges[start] = size; }
void remove_range(uintptr_t start) { ranges.erase(start); }
void add_piece(uintptr_t start, size_t size, int device) { device_pieces[start] = {size, device, false}; }
void remove_pieces(uintptr_t start, size_t size) {
  auto last = device_pieces.lower_bound(start + size);
  device_pieces.erase(device_pieces.lower_bound(start), last);
}

// ---- Device memory ----

struct Window {  // address space of a device
  uintptr_t start, next, end;
};
static Window windows[kMostDevices];

static bool open_window(Window& window) {
  size_t size = settings.address_bytes;
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return false;
  madvise(start, size, MADV_DONTDUMP);
  madvise(start, size, MADV_NOHUGEPAGE);
  add_range((uintptr_t)start, size);
  window.start = window.next = round_up((uintptr_t)start, kGranularity);
  window.end = (uintptr_t)start + size;
  return true;
}

static uintptr_t first_fit(uintptr_t at, uintptr_t end, size_t size) {
  for (auto it = device_pieces.lower_bound(at); it != device_pieces.end() && it->first < end; ++it) {
    if (it->first - at >= size) break;
    at = it->first + round_up(it->second.size, kGranularity);
  }
  return at + size <= end ? at : 0;
}

// Addresses behind those handed out last, else from the window's start; 0 if there are none. torch's
// allocator takes the block at the lowest address among equals: new segments are its last choice.
static uintptr_t find_addresses(int device, size_t size) {
  Window& window = windows[device];
  if (!window.start && !open_window(window)) return 0;
  uintptr_t at = first_fit(window.next, window.end, size);
  if (!at) at = first_fit(window.start, window.end, size);
  if (at) window.next = at + size;
  return at;
}

API int cudaMalloc(void** out, size_t size) {
  *out = nullptr;
  if (!size) return kSuccess;
  std::lock_guard<std::mutex> guard(memory_mutex);
  int device = current_device;
  size_t physical = round_up(size, kGranularity);
  uintptr_t at = find_addresses(device, physical);
  if (!at || !take_bytes(device, physical)) return fail(kOutOfMemory);
  device_pieces[at] = {size, device, false};
  *out = (void*)at;
  return kSuccess;
}

// ---- Pools ----

// A pool grows by chunks and keeps them until it is trimmed. The chunk is an assumption: what
// drivers were seen to reserve for a first small allocation.
static constexpr size_t kPoolChunk = 32 * kMiB, kPoolAlignment = 512;
struct Pool {
  size_t used, used_high, reserved, reserved_high;
};
static Pool pools[kMostDevices];
static uint64_t release_threshold[kMostDevices];

static void* pool_handle(int device) { return &pools[device]; }
static int device_of_pool(void* pool) { return (int)((Pool*)pool - pools); }

API int cudaMallocAsync(void** out, size_t size, Stream) {
  *out = nullptr;
  if (!size) return kSuccess;
  std::lock_guard<std::mutex> guard(memory_mutex);
  int device = current_device;
  Pool& pool = pools[device];
  size_t taken = round_up(size, kPoolAlignment);
  uintptr_t at = find_addresses(device, round_up(size, kGranularity));
  if (!at) return fail(kOutOfMemory);
  size_t wanted = round_up(pool.used + taken, kPoolChunk);
  if (wanted > pool.reserved) {
    if (!take_bytes(device, wanted - pool.reserved)) return fail(kOutOfMemory);
    pool.reserved = wanted;
    pool.reserved_high = std::max(pool.reserved_high, wanted);
  }
  pool.used += taken;
  pool.used_high = std::max(pool.used_high, pool.used);
  device_pieces[at] = {size, device, true};
  *out = (void*)at;
  return kSuccess;
}
static int free_device_memory(void* pointer) {
  if (!pointer) return kSuccess;
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto it = device_pieces.find((uintptr_t)pointer);
  if (it == device_pieces.end()) return fail(kInvalidValue);
  Piece piece = it->second;
  madvise(pointer, round_up(piece.size, kGranularity), MADV_DONTNEED);
  if (piece.pooled) pools[piece.device].used -= round_up(piece.size, kPoolAlignment);
  else give_bytes(piece.device, round_up(piece.size, kGranularity));
  device_pieces.erase(it);
  return kSuccess;
}
API int cudaFree(void* pointer) {
  int error = wait_for_device(), freed = free_device_memory(pointer);  // as CUDA does
  return error ? error : freed;
}
API int cudaFreeAsync(void* pointer, Stream stream) {
  int error = wait_for_stream(stream), freed = free_device_memory(pointer);
  return error ? error : freed;
}

API int cudaDeviceGetDefaultMemPool(void** pool, int device) {
  if (!is_device(device)) return fail(kInvalidDevice);
  *pool = pool_handle(device);
  return kSuccess;
}
API int cudaDeviceGetMemPool(void** pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
// Only the default pools are here: others are refused when they are created.
API int cudaMallocFromPoolAsync(void** out, size_t size, void* pool, Stream stream) {
  int device = device_of_pool(pool), before = current_device;
  if (!is_device(device) || pool != pool_handle(device)) return fail(kInvalidValue);
  current_device = device;
  int error = cudaMallocAsync(out, size, stream);
  return current_device = before, error;
}
API int cudaMemPoolTrimTo(void* handle, size_t keep) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  int device = device_of_pool(handle);
  Pool& pool = pools[device];
  size_t least = round_up(std::max(pool.used, keep), kPoolChunk);
  if (least < pool.reserved) {
    give_bytes(device, pool.reserved - least);
    pool.reserved = least;
  }
  return kSuccess;
}
enum PoolAttribute { kReuseLast = 3, kThreshold = 4, kReserved, kReservedHigh, kUsed, kUsedHigh };
API int cudaMemPoolGetAttribute(void* handle, int which, void* value) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  int device = device_of_pool(handle);
  const Pool& pool = pools[device];
  if (which <= kReuseLast) return *(int*)value = 1, kSuccess;
  const uint64_t values[] = {release_threshold[device], pool.reserved, pool.reserved_high, pool.used,
                             pool.used_high};
  if (which > kUsedHigh) return fail(kInvalidValue);
  *(uint64_t*)value = values[which - kThreshold];
  return kSuccess;
}
API int cudaMemPoolSetAttribute(void* handle, int which, void* value) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  int device = device_of_pool(handle);
  Pool& pool = pools[device];
  if (which == kThreshold) release_threshold[device] = *(uint64_t*)value;
  if (which == kReservedHigh) pool.reserved_high = pool.reserved;  // only zero may be given
  if (which == kUsedHigh) pool.used_high = pool.used;
  return kSuccess;
}
API int cudaDeviceGetGraphMemAttribute(int, int, void* value) { return *(uint64_t*)value = 0, kSuccess; }
NOTHING_TO_DO(cudaMemPoolSetAccess) NOTHING_TO_DO(cudaDeviceSetGraphMemAttribute)

API int cudaMemGetInfo(size_t* available, size_t* total) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  note_in_use(current_device, true);
  *total = settings.total_bytes;
  *available = *total - bytes_in_use(current_device);
  return kSuccess;
}

// ---- Pinned memory ----

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which the headers of older systems lack

// The driver makes all pages of pinned memory resident at once, so they are in the process's memory
// before they are used. The contents stay, and other threads may be writing them.
static void make_resident(void* pointer, size_t size) {
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t start = (uintptr_t)pointer / page * page, end = round_up((uintptr_t)pointer + size, page);
  if (!madvise((void*)start, end - start, kPopulateWrite) || errno != EINVAL) return;
  // Linux before 5.14, or a part is read-only: write each page that can be written.
  FILE* maps = fopen("/proc/self/maps", "re");
  if (!maps) return;
  unsigned long from, to;
  char may_write;
  while (fscanf(maps, "%lx-%lx %*c%c%*[^\n]", &from, &to, &may_write) == 3)
    for (uintptr_t at = std::max<uintptr_t>(from, start); may_write == 'w' && at < std::min<uintptr_t>(to, end);
         at += page)
      __atomic_fetch_or((char*)at, 0, __ATOMIC_RELAXED);
  fclose(maps);
}

API int cudaHostAlloc(void** out, size_t size, unsigned) {
  if (posix_memalign(out, sysconf(_SC_PAGESIZE), std::max<size_t>(size, 1))) return fail(kOutOfMemory);
  make_resident(*out, size);
  std::lock_guard<std::mutex> guard(memory_mutex);
  host_pieces[(uintptr_t)*out] = {size, current_device, false};
  return kSuccess;
}
API int cudaMallocHost(void** out, size_t size) { return cudaHostAlloc(out, size, 0); }
API int cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  host_pieces.erase((uintptr_t)pointer);
  return kSuccess;
}
API int cudaFreeHost(void* pointer) {
  cudaHostUnregister(pointer);
  free(pointer);
  return kSuccess;
}
API int cudaHostRegister(void* pointer, size_t size, unsigned) {
  make_resident(pointer, size);
  std::lock_guard<std::mutex> guard(memory_mutex);
  host_pieces[(uintptr_t)pointer] = {size, current_device, false};
  return kSuccess;
}

// ---- Where a pointer points ----

static const Piece* find_piece(const std::map<uintptr_t, Piece>& pieces, const void* pointer) {
  auto it = pieces.upper_bound((uintptr_t)pointer);
  if (it == pieces.begin()) return nullptr;
  --it;
  return (uintptr_t)pointer - it->first < it->second.size ? &it->second : nullptr;
}
// The bytes around an address that a kernel may touch: of an allocation, whose last page is mapped as a
// whole, or of pinned memory. Both 0 if there are none.
std::pair<uintptr_t, uintptr_t> accessible_around(uintptr_t address) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  for (auto pieces : {&device_pieces, &host_pieces}) {
    auto it = pieces->upper_bound(address);
    if (it == pieces->begin()) continue;
    --it;
    size_t size = pieces == &device_pieces ? round_up(it->second.size, kGranularity) : it->second.size;
    if (address - it->first < size) return {it->first, it->first + size};
  }
  return {0, 0};
}
// The allocation of device memory that an address is in; its size is 0 if there is none.
std::pair<uintptr_t, size_t> allocation_around(const void* pointer) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto it = device_pieces.upper_bound((uintptr_t)pointer);
  if (it == device_pieces.begin()) return {0, 0};
  --it;
  if ((uintptr_t)pointer - it->first >= it->second.size) return {0, 0};
  return {it->first, it->second.size};
}
bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  return find_piece(host_pieces, pointer);
}
bool is_on_device(const void* pointer) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto it = ranges.upper_bound((uintptr_t)pointer);
  return it != ranges.begin() && (--it, (uintptr_t)pointer - it->first < it->second);
}

enum MemoryType { kUnknownToCuda = 0, kOfHost = 1, kOfDevice = 2 };  // cudaMemoryType, CUmemorytype
enum PointerQuestion { kType = 2, kAddress = 3, kIsManaged = 8, kOrdinal = 9 };  // CUpointer_attribute
constexpr int kNoSuchDevice = -2;

// The fields that CUDA 12 and 13 have in common; CUDA 13's structure only has reserved ones more.
struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
};
API int cudaPointerGetAttributes(PointerAttributes* found, const void* pointer) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  *found = {kUnknownToCuda, kNoSuchDevice, nullptr, nullptr};
  void* address = const_cast<void*>(pointer);
  if (auto piece = find_piece(device_pieces, pointer)) *found = {kOfDevice, piece->device, address, nullptr};
  else if (auto piece = find_piece(host_pieces, pointer)) *found = {kOfHost, piece->device, address, address};
  return kSuccess;
}
API int cudaHostGetDevicePointer(void** out, void* pointer, unsigned) {
  return is_pinned(pointer) ? (*out = pointer, kSuccess) : fail(kInvalidValue);
}
API int cuPointerGetAttribute(void* value, int which, DevicePointer pointer) {
  PointerAttributes found;
  cudaPointerGetAttributes(&found, (void*)pointer);
  if (!found.type) return kInvalidValue;
  switch (which) {
    case kType: return *(unsigned*)value = found.type, kSuccess;
    case kAddress: return *(DevicePointer*)value = pointer, kSuccess;
    case kIsManaged: return *(unsigned*)value = 0, kSuccess;
    case kOrdinal: return *(int*)value = found.device, kSuccess;
    default: {
      KeepLastError keep;
      return refuse("cuPointerGetAttribute", "This attribute of a pointer is not known.");
    }
  }
}
