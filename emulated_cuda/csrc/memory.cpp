// Memory of devices, pinned memory of the host, pools (cudaMallocAsync), and copies.
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
#include <cstdlib>
#include <cstring>
#include <map>

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
void give_bytes(int device, size_t bytes) { in_use[device] -= bytes; }
size_t bytes_in_use(int device) { return in_use[device] + settings.context_bytes; }

void add_range(uintptr_t start, size_t size) { ranges[start] = size; }
void remove_range(uintptr_t start) { ranges.erase(start); }
void add_piece(uintptr_t start, size_t size, int device) { device_pieces[start] = {size, device, false}; }
void remove_pieces(uintptr_t start, size_t size) {
  auto last = device_pieces.lower_bound(start + size);
  device_pieces.erase(device_pieces.lower_bound(start), last);
}

// ---- Pages ----

static const size_t kPage = sysconf(_SC_PAGESIZE);

// Zero without committing: whole pages are returned to the system, and read as zero afterwards.
static void zero(char* start, size_t size) {
  char* first = (char*)round_up((uintptr_t)start, kPage);
  char* last = (char*)((uintptr_t)(start + size) / kPage * kPage);
  if (first >= last || madvise(first, last - first, MADV_DONTNEED)) {
    memset(start, 0, size);
    return;
  }
  memset(start, 0, first - start);
  memset(last, 0, start + size - last);
}

// Copy between devices, leaving pages uncommitted that were never written at the source.
static void copy_committed(char* to, const char* from, size_t size) {
  int pages = size < 16 * kPage ? -1 : open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pages < 0 || (to < from + size && from < to + size)) {
    memmove(to, from, size);
  } else {
    uint64_t entries[512];
    for (size_t done = 0; done < size;) {
      uintptr_t page = (uintptr_t)(from + done) / kPage;
      ssize_t got = pread(pages, entries, sizeof entries, page * sizeof *entries);
      size_t known = got > 0 ? got / sizeof *entries : 0;
      if (!known) {
        memmove(to + done, from + done, size - done);
        break;
      }
      for (size_t i = 0; i < known && done < size; ++i) {
        size_t step = std::min(size - done, (page + i + 1) * kPage - (uintptr_t)(from + done));
        bool committed = entries[i] >> 62;  // present, or swapped out
        if (committed) memcpy(to + done, from + done, step);
        else zero(to + done, step);
        done += step;
      }
    }
  }
  if (pages >= 0) close(pages);
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
  *total = settings.total_bytes;
  *available = *total - bytes_in_use(current_device);
  return kSuccess;
}

// ---- Pinned memory ----

API int cudaHostAlloc(void** out, size_t size, unsigned) {
  if (posix_memalign(out, kPage, std::max<size_t>(size, 1))) return fail(kOutOfMemory);
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
static bool is_on_device(const void* pointer) {
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
API int cuPointerGetAttribute(void* value, int which, DevicePointer pointer) {
  PointerAttributes found;
  cudaPointerGetAttributes(&found, (void*)pointer);
  if (!found.type) return kInvalidValue;
  switch (which) {
    case kType: return *(unsigned*)value = found.type, kSuccess;
    case kAddress: return *(DevicePointer*)value = pointer, kSuccess;
    case kIsManaged: return *(unsigned*)value = 0, kSuccess;
    case kOrdinal: return *(int*)value = found.device, kSuccess;
    default: return refuse("cuPointerGetAttribute", "This attribute of a pointer is not known.");
  }
}

// ---- Copies ----

// torch branches on small values that it reads back: results of .item(), numbers of non-zero
// elements. A kernel would have written them. Stale bytes could be any number, such as a size of
// terabytes. So small reads give zero, unless the host wrote the bytes and no kernel ran since. If
// values are computed, only reads inside of an operator give zero.
static constexpr size_t kSmallRead = 16;
struct Write {
  uintptr_t start;
  size_t size;
  uint64_t launches;
};
static Write recent_writes[256];
static unsigned next_write;
std::atomic<uint64_t> launches{0};

static bool is_known(const void* pointer, size_t size) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto start = (uintptr_t)pointer;
  for (const Write& write : recent_writes)
    if (write.launches == launches && write.start <= start && start + size <= write.start + write.size)
      return true;
  return false;
}
static void copy(void* to, const void* from, size_t size) {
  if (!size) return;
  bool reads = is_on_device(from), writes = is_on_device(to);
  if (phase() == kCopyOperator || (phase() == kOperator && reads && writes)) return;
  if (reads && phase() == kOperator && answer(to, size)) return;
  if (reads && writes) return copy_committed((char*)to, (const char*)from, size);
  bool is_stale = !values_are_computed || phase() == kOperator;
  if (reads && is_stale && size <= kSmallRead && !is_known(from, size)) {
    memset(to, 0, size);
    return;
  }
  memmove(to, from, size);
  if (!writes) return;
  std::lock_guard<std::mutex> guard(memory_mutex);
  recent_writes[next_write++ % 256] = {(uintptr_t)to, size, launches};
}
static int copied(void* to, const void* from, size_t size, Stream stream) {
  if (int error = wait_for_stream(stream)) return error;
  count_work();
  copy(to, from, size);
  return kSuccess;
}
static int copied_2d(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                     size_t height, Stream stream) {
  if (int error = wait_for_stream(stream)) return error;
  count_work();
  for (size_t row = 0; row < height; ++row)
    copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  return kSuccess;
}
API int cudaMemcpy(void* to, const void* from, size_t size, int) { return copied(to, from, size, nullptr); }
API int cudaMemcpyAsync(void* to, const void* from, size_t size, int, Stream stream) {
  return copied(to, from, size, stream);
}
API int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, Stream stream) {
  return copied(to, from, size, stream);
}
API int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                          size_t height, int, Stream stream) {
  return copied_2d(to, to_pitch, from, from_pitch, width, height, stream);
}
// Variables of kernels, which never run.
NOTHING_TO_DO(cudaMemcpyToSymbol)
API int cudaGetSymbolAddress(void** address, const void*) {
  static char variable[64 * kKiB];
  return *address = variable, kSuccess;
}
static int filled(void* start, int value, size_t size, Stream stream) {
  if (int error = wait_for_stream(stream)) return error;
  count_work();
  if (phase() != kNoOperator) return kSuccess;
  if (!value && is_on_device(start)) zero((char*)start, size);
  else memset(start, value, size);
  return kSuccess;
}
API void emulated_zero(void* start, size_t size) { zero((char*)start, size); }
API int cudaMemset(void* start, int value, size_t size) { return filled(start, value, size, nullptr); }
API int cudaMemsetAsync(void* start, int value, size_t size, Stream stream) {
  return filled(start, value, size, stream);
}
