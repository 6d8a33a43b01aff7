// What `python -m emulated_cuda` reads about a process: the memory that each device has had in use, and the
// status with which the process has called exit. The file outlives a process that is killed.
#include "figures.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <mutex>

namespace {
struct Device {
  uint64_t most_bytes, missing_bytes;
};
struct Figures {  // `_FIGURES` and `_STATUS` in loading/records.py
  Device devices[kMostDevices];
  int64_t status_known, status;
};
Figures own;
Figures* figures = &own;  // read and written under the mutex of memory
}  // namespace

void note_bytes_in_use(int device, size_t bytes) {
  uint64_t& most = figures->devices[device].most_bytes;
  most = std::max<uint64_t>(most, bytes);
}
void note_missing_bytes(int device, size_t bytes) { figures->devices[device].missing_bytes = bytes; }

API void emulated_note_exit_status(int status) {
  figures->status = status & 0xff;
  figures->status_known = 1;
}
static void note_at_exit(int status, void*) { emulated_note_exit_status(status); }

// A forked process begins with figures of its own; it has used no device.
API int emulated_keep_figures_in(const char* path) {
  int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return errno;
  void* start = ftruncate(file, sizeof own)
                    ? MAP_FAILED
                    : mmap(nullptr, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  int error = start == MAP_FAILED ? errno : 0;
  close(file);
  if (error) return error;
  static std::once_flag once;  // a forked process has what its parent has registered
  std::call_once(once, [] { on_exit(note_at_exit, nullptr); });
  std::lock_guard<std::mutex> guard(memory_mutex);
  figures = (Figures*)start;
  return 0;
}
