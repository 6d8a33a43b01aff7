// Memory that the processes of this machine share. It has no name, so nothing is left when they end: a
// process opens that of another under /proc/<pid>/fd.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>

// A new empty file in memory; -1 if there is none.
inline int shared_file() { return (int)syscall(SYS_memfd_create, "emulated_cuda", MFD_CLOEXEC); }
// The file of another process, or -1.
inline int open_of_process(int pid, int file) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
  return open(path, O_RDWR | O_CLOEXEC);
}
// Maps a file, which grows to this size; null if that fails. Pages take memory when they are written.
inline void* map_shared(int file, size_t size) {
  off_t before = lseek(file, 0, SEEK_END);
  if (before < 0 || (before < (off_t)size && ftruncate(file, (off_t)size))) return nullptr;
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  return start == MAP_FAILED ? nullptr : start;
}
