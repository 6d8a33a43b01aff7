// Copies and fills, in the host memory that device memory is.
#include "graphs.hpp"
#include "profiling.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

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

// Copy from a device, leaving pages uncommitted that were never written at the source.
static void copy_committed(char* to, const char* from, size_t size) {
  int pages = size < 16 * kPage ? -1 : open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pages < 0 || (to < from + size && from < to + size)) {
    memmove(to, from, size);
  } else {
    uint64_t entries[512];
    size_t done = 0, zeros_from = 0;  // all pages between are zero: as many as possible are returned at once
    while (done < size) {
      uintptr_t page = (uintptr_t)(from + done) / kPage;
      ssize_t got = pread(pages, entries, sizeof entries, page * sizeof *entries);
      size_t known = got > 0 ? got / sizeof *entries : 0;
      if (!known) break;
      for (size_t i = 0; i < known && done < size; ++i) {
        size_t step = std::min(size - done, (page + i + 1) * kPage - (uintptr_t)(from + done));
        bool committed = entries[i] >> 62;  // present, or swapped out
        if (committed) {
          zero(to + zeros_from, done - zeros_from);
          memcpy(to + done, from + done, step);
          zeros_from = done + step;
        }
        done += step;
      }
    }
    zero(to + zeros_from, done - zeros_from);
    memcpy(to + done, from + done, size - done);
  }
  if (pages >= 0) close(pages);
}

// Whether pages of the host are zero after they were returned to the system. Those of files and of shared memory are
// not. For these MADV_FREE fails; for others it may forget the contents, all of which the caller overwrites.
static bool is_private_memory(char* start, size_t size) {
  char* first = (char*)round_up((uintptr_t)start, kPage);
  char* last = (char*)((uintptr_t)(start + size) / kPage * kPage);
  return first < last && !madvise(first, last - first, MADV_FREE);
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

bool is_known(const void* pointer, size_t size) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto start = (uintptr_t)pointer;
  for (const Write& write : recent_writes)
    if (write.launches == launches && write.start <= start && start + size <= write.start + write.size)
      return true;
  return false;
}
void note_write(const void* start, size_t size, uint64_t after_launches) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  recent_writes[next_write++ % 256] = {(uintptr_t)start, size, after_launches};
}
void forget_writes(const void* start, size_t size) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto first = (uintptr_t)start;
  for (Write& write : recent_writes)
    if (write.start < first + size && first < write.start + write.size) write.size = 0;
}
// A read by others than torch, whose operators Python checks: a kernel that nobody computed may have written
// what is read.
static int check_read(const void* to, const void* from, size_t size) {
  if (!values_are_computed || phase() != kNoOperator || !unknown_work_counted()) return kSuccess;
  if (!is_on_device(from) || is_on_device(to) || is_known(from, size)) return kSuccess;
  return refuse("Reading memory that a kernel may have written",
                "Kernels of your own are not computed: write them in Triton, or use a GPU.");
}
// Without values nobody computes with what is copied to a device. Large copies, which are weights and data,
// leave zeros there: neither their pages nor as many of the device's have to be in memory. Large copies back, such
// as of activations that are saved on the host, have the same contents as ever, but where nothing was ever written
// on the device, the host's pages are zero without being in memory. Pinned memory is in memory as a whole.
static constexpr size_t kLargestCopied = kMiB;
static std::atomic<bool> leaves_out_copies{false};
API void emulated_leave_out_copies(int on) { leaves_out_copies = on; }
static void copy(void* to, const void* from, size_t size) {
  if (!size) return;
  bool reads = is_on_device(from), writes = is_on_device(to);
  if (phase() == kCopyOperator || (phase() == kOperator && reads && writes)) return;
  if (reads && phase() == kOperator && answer(to, size)) return;
  if (reads && writes) {
    copy_committed((char*)to, (const char*)from, size);
    if (!values_are_computed && is_known(from, size)) note_write(to, size);  // such as what a collective gathered
    return;
  }
  bool is_left_out = leaves_out_copies && size > kLargestCopied;
  if (writes && is_left_out) return zero((char*)to, size);
  if (reads && is_left_out && !is_pinned(to) && is_private_memory((char*)to, size))
    return copy_committed((char*)to, (const char*)from, size);
  bool is_stale = !values_are_computed || phase() == kOperator;
  if (reads && is_stale && size <= kSmallRead && !is_known(from, size)) {
    memset(to, 0, size);
    return;
  }
  memmove(to, from, size);
  if (writes) note_write(to, size);
}
static int copied(void* to, const void* from, size_t size, Stream stream) {
  if (size && (!may_access(to, size) || !may_access(from, size))) return fail(kInvalidValue);
  ProfiledCallScope profiled(kCallCopy);
  if (int error = wait_for_stream(stream)) return error;
  if (int error = check_read(to, from, size)) return error;
  count_work();
  profiled.copy(to, from, size, stream);
  if (phase() == kNoOperator && record_work(stream, nullptr, to, from, size)) return kSuccess;
  copy(to, from, size);
  return kSuccess;
}
// Whether rows may be accessed, with what is between them: all are in one allocation, or in neighbours.
static bool may_access_rows(const void* start, size_t pitch, size_t width, size_t height) {
  if (!height) return true;
  if (height > 1 && (width > SIZE_MAX / 2 || pitch > SIZE_MAX / 2 / height)) return false;
  return may_access(start, (height - 1) * pitch + width);
}
static int copied_2d(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                     size_t height, Stream stream) {
  if (!width) return kSuccess;  // whatever the height
  ProfiledCallScope profiled(kCallCopy);
  if (int error = wait_for_stream(stream)) return error;
  count_work();
  if (!may_access_rows(to, to_pitch, width, height) || !may_access_rows(from, from_pitch, width, height))
    return fail(kInvalidValue);
  profiled.copy(to, from, width * height, stream);
  for (size_t row = 0; row < height; ++row)
    if (phase() != kNoOperator ||
        !record_work(stream, nullptr, (char*)to + row * to_pitch, (const char*)from + row * from_pitch, width))
      copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  return kSuccess;
}
API int cudaMemcpy(void* to, const void* from, size_t size, int) { return copied(to, from, size, nullptr); }
API int cudaMemcpyAsync(void* to, const void* from, size_t size, int, Stream stream) {
  return copied(to, from, size, stream);
}
API int cudaMemcpyPeer(void* to, int, const void* from, int, size_t size) { return copied(to, from, size, nullptr); }
API int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, Stream stream) {
  return copied(to, from, size, stream);
}
API int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                          size_t height, int, Stream stream) {
  return copied_2d(to, to_pitch, from, from_pitch, width, height, stream);
}
API int cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int) {
  return copied_2d(to, to_pitch, from, from_pitch, width, height, nullptr);
}
// Variables of kernels, which never run.
NOTHING_TO_DO(cudaMemcpyToSymbol)
API int cudaGetSymbolAddress(void** address, const void*) {
  static char variable[64 * kKiB];
  return *address = variable, kSuccess;
}
static int filled(void* start, int value, size_t size, Stream stream) {
  if (!may_access(start, size)) return fail(kInvalidValue);
  ProfiledCallScope profiled(kCallFill);
  if (int error = wait_for_stream(stream)) return error;
  count_work();
  profiled.fill(start, (unsigned)value, size, stream);
  if (phase() != kNoOperator) return kSuccess;
  if (capture_of(stream)) {
    // Without values no phase is known inside of torch's operators, which fill their semaphores, and a
    // replay computes nothing.
    if (!values_are_computed) return kSuccess;
    return refuse("cudaMemsetAsync", "Capture a fill by an operator of torch, such as tensor.zero_(), instead.");
  }
  if (!value && is_on_device(start)) zero((char*)start, size);
  else memset(start, value, size);
  note_write(start, size);
  return kSuccess;
}
// Fills rows of elements of 1, 2 or 4 bytes.
int fill_elements(void* start, size_t pitch, unsigned value, int size, size_t width, size_t height, Stream stream) {
  if (size == 1 && height == 1) return filled(start, (int)value, width, stream);
  if (!width) return kSuccess;  // whatever the height
  if (width > SIZE_MAX / size) return fail(kInvalidValue);
  if (!may_access_rows(start, pitch, width * size, height)) return fail(kInvalidValue);
  ProfiledCallScope profiled(kCallFill);
  if (int error = wait_for_stream(stream)) return error;
  count_work();
  profiled.fill(start, value, width * size * height, stream);
  if (phase() != kNoOperator) return kSuccess;
  if (capture_of(stream)) return refuse("cuMemsetD*", "Capture a fill by an operator of torch, such as tensor.zero_(), instead.");
  for (size_t row = 0; row < height; ++row) {
    char* first = (char*)start + row * pitch;
    for (size_t i = 0; i < width; ++i) memcpy(first + i * size, &value, size);  // little-endian
    note_write(first, width * size);
  }
  return kSuccess;
}
API void emulated_zero(void* start, size_t size) { zero((char*)start, size); }
API int cudaMemset(void* start, int value, size_t size) { return filled(start, value, size, nullptr); }
API int cudaMemset2D(void* start, size_t pitch, int value, size_t width, size_t height) {
  return fill_elements(start, pitch, (unsigned)value, 1, width, height, nullptr);
}
API int cudaMemset2DAsync(void* start, size_t pitch, int value, size_t width, size_t height, Stream stream) {
  return fill_elements(start, pitch, (unsigned)value, 1, width, height, stream);
}
API int cudaMemsetAsync(void* start, int value, size_t size, Stream stream) {
  return filled(start, value, size, stream);
}

// ---- Memory of three dimensions: rows at a distance, and slices of as many rows as were allocated ----

extern "C" int cudaMalloc(void**, size_t);  // memory.cpp
struct Extent {
  size_t width, height, depth;
};
struct Pitched {  // cudaPitchedPtr
  char* start;
  size_t pitch, width, height;
};
API int cudaMallocPitch(void** out, size_t* pitch, size_t width, size_t height) {
  if (width > SIZE_MAX / 2) return fail(kOutOfMemory);
  *pitch = round_up(width, kPitch);
  if (*pitch && height > SIZE_MAX / *pitch) return fail(kOutOfMemory);
  return cudaMalloc(out, *pitch * height);
}
API int cudaMalloc3D(Pitched* out, Extent wanted) {
  if (wanted.height && wanted.depth > SIZE_MAX / wanted.height) return fail(kOutOfMemory);
  out->width = wanted.width;
  out->height = wanted.height;
  return cudaMallocPitch((void**)&out->start, &out->pitch, wanted.width, wanted.height * wanted.depth);
}
API int cudaMemset3DAsync(Pitched to, int value, Extent wanted, Stream stream) {
  if (!wanted.width || !wanted.height || !wanted.depth) return kSuccess;
  if (wanted.depth > 1 && to.height > (SIZE_MAX - wanted.height) / wanted.depth) return fail(kInvalidValue);
  size_t rows = (wanted.depth - 1) * to.height + wanted.height;
  if (!may_access_rows(to.start, to.pitch, wanted.width, rows)) return fail(kInvalidValue);
  for (size_t slice = 0; slice < wanted.depth; ++slice) {
    char* first = to.start + slice * to.pitch * to.height;
    if (int error = fill_elements(first, to.pitch, (unsigned)value, 1, wanted.width, wanted.height, stream)) return error;
  }
  return kSuccess;
}
API int cudaMemset3D(Pitched to, int value, Extent wanted) { return cudaMemset3DAsync(to, value, wanted, nullptr); }
