// Copies and fills, in the host memory that device memory is.
#include "graphs.hpp"

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
  if (phase() == kNoOperator && record_work(stream, nullptr, to, from, size)) return kSuccess;
  copy(to, from, size);
  return kSuccess;
}
static int copied_2d(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                     size_t height, Stream stream) {
  if (int error = wait_for_stream(stream)) return error;
  count_work();
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
  if (capture_of(stream)) {
    // Without values no phase is known inside of torch's operators, which fill their semaphores, and a
    // replay computes nothing.
    if (!values_are_computed) return kSuccess;
    return refuse("cudaMemsetAsync", "A fill outside of torch's operators cannot be captured.");
  }
  if (!value && is_on_device(start)) zero((char*)start, size);
  else memset(start, value, size);
  return kSuccess;
}
API void emulated_zero(void* start, size_t size) { zero((char*)start, size); }
API int cudaMemset(void* start, int value, size_t size) { return filled(start, value, size, nullptr); }
API int cudaMemsetAsync(void* start, int value, size_t size, Stream stream) {
  return filled(start, value, size, stream);
}
