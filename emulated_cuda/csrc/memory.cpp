// Memory of devices, and pinned memory of the host, as the CUDA runtime gives it (cudaMalloc).
//
// Torch's own caching allocator calls these functions: it rounds sizes, splits blocks and writes the
// message of an OutOfMemoryError as it does on a card.
//
// Device memory is host memory, reserved and only committed when it is written. Kernels write
// nothing, so hardly any is unless values are computed.
#include "figures.hpp"
#include "machine.hpp"
#include "pending.hpp"
#include "pools.hpp"

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
  Pool* pool = nullptr;
  bool registered = false;  // memory of the host that the program has allocated
  uint64_t id = 0;
  void* context = nullptr;  // in which it was allocated; null for pooled and mapped memory
  bool synchronous = false;
};
static std::map<uintptr_t, Piece> device_pieces, host_pieces;
static std::map<uintptr_t, size_t> ranges;  // start and size
static size_t in_use[kMostDevices];         // beside the context

// ---- Accounting ----

bool take_bytes(int device, size_t bytes) {
  size_t usable = settings.total_bytes - settings.context_bytes, free = usable - in_use[device];
  if (bytes > free) {
    note_missing_bytes(device, bytes - free);
    return false;
  }
  if (!machine_has(bytes)) return false;
  size_t wanted = in_use[device] + bytes;
  in_use[device] = wanted;
  tell_nvml(device, true);
  note_bytes_in_use(device, wanted);
  return true;
}
void give_bytes(int device, size_t bytes) {
  in_use[device] -= bytes;
  tell_nvml(device, false);
}
size_t bytes_in_use(int device) { return in_use[device] + settings.context_bytes; }

void add_range(uintptr_t start, size_t size) { ranges[start] = size; }
void remove_range(uintptr_t start) { ranges.erase(start); }
static uint64_t last_id;
static Piece& insert(std::map<uintptr_t, Piece>& pieces, uintptr_t start, Piece piece) {
  piece.id = ++last_id;
  return pieces[start] = piece;
}
void add_piece(uintptr_t start, size_t size, int device) { insert(device_pieces, start, {size, device}); }
void add_pooled_piece(uintptr_t start, size_t size, int device, Pool* pool) {
  insert(device_pieces, start, {size, device, pool});
}
void remove_pieces(uintptr_t start, size_t size) {
  auto last = device_pieces.lower_bound(start + size);
  device_pieces.erase(device_pieces.lower_bound(start), last);
}

// ---- Device memory ----

// What is too large stays so: rounding must not turn it into nothing.
static size_t rounded(size_t size) { return size > SIZE_MAX / 2 ? size : round_up(size, kGranularity); }

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

// Where a replay wants the next allocation, because a recording has it there: bytes from the window's start.
static constexpr size_t kAnywhere = SIZE_MAX;
static size_t next_position = kAnywhere, refused_positions;

static bool is_free(uintptr_t at, size_t size) {
  auto after = device_pieces.lower_bound(at);
  if (after != device_pieces.end() && after->first < at + size) return false;
  if (after == device_pieces.begin()) return true;
  --after;
  return after->first + round_up(after->second.size, kGranularity) <= at;
}
// The addresses at the position that is wanted; 0 if none is, or if they are in use or in no window.
static uintptr_t wanted_addresses(const Window& window, size_t size) {
  size_t position = std::exchange(next_position, kAnywhere), length = window.end - window.start;
  if (position == kAnywhere) return 0;
  bool fits = position % kGranularity == 0 && position <= length && size <= length - position;
  if (fits && is_free(window.start + position, size)) return window.start + position;
  return ++refused_positions, 0;
}

// Finds addresses after those handed out last, or else from the window's start; 0 if there are none. torch's
// allocator prefers the lowest address among equal blocks, so it uses those of older segments first.
uintptr_t find_addresses(int device, size_t size) {
  Window& window = windows[device];
  if (!window.start && !open_window(window)) return 0;
  if (uintptr_t wanted = wanted_addresses(window, size)) return wanted;
  uintptr_t at = first_fit(window.next, window.end, size);
  if (!at) at = first_fit(window.start, window.end, size);
  if (at) window.next = at + size;
  return at;
}

// Leaves the lowest addresses of the current device to allocations that have a position.
API void emulated_leave_positions(size_t bytes) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  Window& window = windows[current_device];
  if (!window.start && !open_window(window)) return;
  size_t length = window.end - window.start;
  window.next = window.start + (bytes < length ? round_up(bytes, kGranularity) : length);
}
// Sets the position of the next allocation; SIZE_MAX for any. Returns how many could not have theirs.
API size_t emulated_set_next_position(size_t position) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  next_position = position;
  return refused_positions;
}

API int cudaMalloc(void** out, size_t size) {
  make_driver_ready();
  *out = nullptr;
  if (!size) return kSuccess;
  void* context = current_context();
  std::lock_guard<std::mutex> guard(memory_mutex);
  int device = current_device;
  size_t physical = rounded(size);
  if (!take_bytes(device, physical)) return fail(kOutOfMemory);
  uintptr_t at = find_addresses(device, physical);
  if (!at) return give_bytes(device, physical), fail(kOutOfMemory);
  insert(device_pieces, at, {size, device}).context = context;
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
  if (piece.pool) give_to_pool(piece.pool, piece.size);
  else give_bytes(piece.device, round_up(piece.size, kGranularity));
  device_pieces.erase(it);
  return kSuccess;
}
API int cudaFree(void* pointer) {
  make_driver_ready();
  int error = wait_for_device(), freed = free_device_memory(pointer);  // as CUDA does
  return error ? error : freed;
}
API int cudaFreeAsync(void* pointer, Stream stream) {
  int error = wait_for_stream(stream), freed = free_device_memory(pointer);
  return error ? error : freed;
}

API int cudaMemGetInfo(size_t* available, size_t* total) {
  make_driver_ready();
  std::lock_guard<std::mutex> guard(memory_mutex);
  tell_nvml(current_device, true);
  // torch asks this, once or more, before it raises that the card has no memory left. If it is the machine, that
  // would be wrong, and it raises this error instead.
  if (is_problem_of_machine_new()) return fail(kOutOfMemory);
  *total = settings.total_bytes;
  *available = *total - bytes_in_use(current_device);
  return kSuccess;
}

// ---- Pinned memory ----

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which the headers of older systems lack

// The driver makes all pages of pinned memory resident at once, so they are in the process's memory
// before they are used. The contents stay, and other threads may be writing them. Returns false if some of it
// is no memory, or if there is not enough.
static bool make_resident(void* pointer, size_t size) {
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t start = (uintptr_t)pointer / page * page, end = round_up((uintptr_t)pointer + size, page);
  if (!madvise((void*)start, end - start, kPopulateWrite)) return true;
  if (errno != EINVAL) return errno != ENOMEM;
  // Linux before 5.14, or a part is read-only: write each page that can be written.
  FILE* maps = fopen("/proc/self/maps", "re");
  if (!maps) return true;
  unsigned long from, to;
  char may_write;
  while (fscanf(maps, "%lx-%lx %*c%c%*[^\n]", &from, &to, &may_write) == 3)
    for (uintptr_t at = std::max<uintptr_t>(from, start); may_write == 'w' && at < std::min<uintptr_t>(to, end);
         at += page)
      __atomic_fetch_or((char*)at, 0, __ATOMIC_RELAXED);
  fclose(maps);
  return true;
}

// The size is not that of the tensor: torch's allocator for pinned memory has already rounded it up to a
// power of two.
API int cudaHostAlloc(void** out, size_t size, unsigned) {
  make_driver_ready();
  if (posix_memalign(out, sysconf(_SC_PAGESIZE), std::max<size_t>(size, 1))) return fail(kOutOfMemory);
  if (!make_resident(*out, size)) return free(*out), fail(kOutOfMemory);
  void* context = current_context();
  std::lock_guard<std::mutex> guard(memory_mutex);
  insert(host_pieces, (uintptr_t)*out, {size, current_device}).context = context;
  return kSuccess;
}
API int cudaMallocHost(void** out, size_t size) { return cudaHostAlloc(out, size, 0); }
// Whether some of these bytes are pinned. Hold the mutex.
static bool is_in_host_piece(const void* pointer, size_t size) {
  auto after = host_pieces.lower_bound((uintptr_t)pointer + size);
  if (after == host_pieces.begin()) return false;
  --after;
  return after->first + after->second.size > (uintptr_t)pointer;
}
// Forgets pinned memory that begins at `pointer`; false if there is none of this kind.
static bool forget_host_piece(void* pointer, bool registered) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto found = host_pieces.find((uintptr_t)pointer);
  if (found == host_pieces.end() || found->second.registered != registered) return false;
  return host_pieces.erase(found), true;
}
API int cudaHostUnregister(void* pointer) {
  if (forget_host_piece(pointer, true)) return kSuccess;
  std::lock_guard<std::mutex> guard(memory_mutex);
  return fail(is_in_host_piece(pointer, 1) ? kInvalidValue : kHostMemoryNotRegistered);
}
API int cudaFreeHost(void* pointer) {
  if (!pointer) return kSuccess;
  if (!forget_host_piece(pointer, false)) return fail(kInvalidValue);
  free(pointer);
  return kSuccess;
}
API int cudaHostRegister(void* pointer, size_t size, unsigned) {
  make_driver_ready();
  if (!pointer || !size || size > SIZE_MAX / 2 || !make_resident(pointer, size)) return fail(kInvalidValue);
  void* context = current_context();
  std::lock_guard<std::mutex> guard(memory_mutex);
  if (is_in_host_piece(pointer, size)) return fail(kHostMemoryAlreadyRegistered);  // as a whole or in part
  auto& piece = insert(host_pieces, (uintptr_t)pointer, {size, current_device, nullptr, true});
  piece.context = context;
  return kSuccess;
}

// ---- Where a pointer points ----

static const Piece* find_piece(const std::map<uintptr_t, Piece>& pieces, const void* pointer,
                               uintptr_t* start = nullptr) {
  auto it = pieces.upper_bound((uintptr_t)pointer);
  if (it == pieces.begin()) return nullptr;
  --it;
  if (start) *start = it->first;
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
bool is_in_range(uintptr_t start, size_t size) {
  auto it = ranges.upper_bound(start);
  return it != ranges.begin() && (--it, start - it->first < it->second && size <= it->second - (start - it->first));
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
  return is_in_range((uintptr_t)pointer, 1);
}
bool may_access(const void* pointer, size_t size) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  uintptr_t at = (uintptr_t)pointer;
  if (!is_in_range(at, 1)) return true;
  while (size) {  // an expandable segment has many pieces, one behind the other
    auto it = device_pieces.upper_bound(at);
    if (it == device_pieces.begin()) return false;
    --it;
    size_t before = at - it->first, piece = round_up(it->second.size, kGranularity);
    if (before >= piece) return false;
    size_t step = std::min(size, piece - before);
    at += step;
    size -= step;
  }
  return true;
}

enum MemoryType { kUnknownToCuda = 0, kOfHost = 1, kOfDevice = 2 };  // cudaMemoryType, CUmemorytype
// CUpointer_attribute
enum PointerQuestion {
  kContext = 1, kType, kAddress, kHostAddress, kTokens, kSynchronous, kId, kIsManaged, kOrdinal, kMaySend,
  kRangeStart, kRangeSize, kIsMapped, kHandleTypes, kMayUseNetwork, kAccess, kPool,
};
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
// Returns the size of what an attribute of a pointer is written as, or 0 if it is not known.
static size_t size_of(int which) {
  switch (which) {
    case kContext: case kAddress: case kHostAddress: case kId: case kRangeStart: case kRangeSize:
    case kHandleTypes: case kPool:
      return 8;
    case kType: case kSynchronous: case kIsManaged: case kOrdinal: case kMaySend: case kIsMapped:
    case kMayUseNetwork: case kAccess:
      return 4;
    default: return 0;
  }
}
static int refuse_attribute(const char* function) {
  KeepLastError keep;
  return refuse(function, "This attribute of a pointer is not emulated: leave out this call, or use a GPU.");
}
API int cuPointerGetAttribute(void* value, int which, DevicePointer pointer) {
  constexpr int kReadAndWrite = 3;
  std::lock_guard<std::mutex> guard(memory_mutex);
  uintptr_t start = 0;
  const Piece* of_device = find_piece(device_pieces, (void*)pointer, &start);
  const Piece* piece = of_device ? of_device : find_piece(host_pieces, (void*)pointer, &start);
  if (!piece) return kInvalidValue;
  if (!size_of(which)) return refuse_attribute("cuPointerGetAttribute");
  if (which == kHostAddress && of_device) return kInvalidValue;  // as CUDA: the host cannot use it
  auto answer = [&]() -> uint64_t {
    switch (which) {
      case kContext: return (uintptr_t)piece->context;
      case kType: return of_device ? kOfDevice : kOfHost;
      case kAddress: case kHostAddress: return pointer;
      case kSynchronous: return piece->synchronous;
      case kId: return piece->id;
      case kOrdinal: return piece->device;
      case kRangeStart: return start;
      case kRangeSize: return piece->size;
      case kIsMapped: return 1;
      case kAccess: return kReadAndWrite;
      case kPool: return (uintptr_t)piece->pool;
      default: return 0;  // not managed, and cannot be sent to other processes or devices
    }
  }();
  return memcpy(value, &answer, size_of(which)), kSuccess;  // little-endian
}
// What is not known of a pointer is 0, as CUDA returns it for pointers that it does not know.
API int cuPointerGetAttributes(unsigned count, const int* which, void** values, DevicePointer pointer) {
  for (unsigned i = 0; i < count; ++i) {
    int error = cuPointerGetAttribute(values[i], which[i], pointer);
    if (error && !size_of(which[i])) return refuse_attribute("cuPointerGetAttributes");
    if (error) memset(values[i], 0, size_of(which[i]));
    if (error && which[i] == kOrdinal) *(int*)values[i] = kNoSuchDevice;
  }
  return kSuccess;
}
// Copies are made at once, so one that must be is as any other.
API int cuPointerSetAttribute(const void* value, int which, DevicePointer pointer) {
  if (which != kSynchronous) return kInvalidValue;  // the only one that can be set
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto piece = const_cast<Piece*>(find_piece(device_pieces, (void*)pointer));
  if (!piece) return kInvalidValue;
  return piece->synchronous = *(const int*)value, kSuccess;
}
