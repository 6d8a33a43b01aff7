// What each process of an emulated machine has in use on its devices, for NVML and nvidia-smi.
//
// A process writes its figures into memory without a name, as those of NCCL are (shared_memory.hpp), so
// nothing is left when it ends or is killed. Others find it among the open files of this user's
// processes: the file is called after the machine, which processes have in common that one program
// started.
#include "shared_memory.hpp"
#include "emulated.hpp"

#include <dirent.h>
#include <pthread.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <string>

struct InUse {
  uint64_t process;  // a forked process has its parent's file open as well
  uint64_t bytes[kMostDevices];  // of physical devices, with the context; 0 if it does not use one
};
static InUse own;
static InUse* published = nullptr;
static std::string file_name;
static bool used[kMostDevices];  // a context remains when its last allocation is freed

// ---- This process ----

static void forget_parent() {
  published = nullptr;
  own = {};
  memset(used, 0, sizeof used);
}

// Publishes from now on under the name of a machine. Without a name NVML only knows this process.
API void emulated_join(const char* machine) {
  static int registered = pthread_atfork(nullptr, nullptr, forget_parent);
  (void)registered;
  std::lock_guard<std::mutex> guard(memory_mutex);
  file_name = std::string("emulated_cuda-") + machine;
}

static void publish() {
  if (file_name.empty() || published) return;
  int file = (int)syscall(SYS_memfd_create, file_name.c_str(), MFD_CLOEXEC);
  if (file < 0) return;
  auto* start = (InUse*)map_shared(file, sizeof(InUse));
  if (!start) {
    close(file);
    return;
  }
  *start = own;
  start->process = (uint64_t)getpid();
  published = start;
}

void note_in_use(int device, bool is_use) {
  used[device] |= is_use;
  if (!used[device]) return;  // what a forked process frees is its parent's
  int physical = visible_devices()[device];
  own.bytes[physical] = bytes_in_use(device);
  if (is_use) publish();
  if (published) __atomic_store_n(&published->bytes[physical], own.bytes[physical], __ATOMIC_RELAXED);
}

// ---- All processes ----

// Reads the figures of a process if it belongs to this machine.
static bool read_process(const char* process, const std::string& link, InUse* found) {
  std::string folder = std::string("/proc/") + process + "/fd";
  struct stat owner;
  if (stat(folder.c_str(), &owner) || owner.st_uid != geteuid()) return false;
  DIR* files = opendir(folder.c_str());
  if (!files) return false;
  bool is_found = false;
  char target[256];
  while (dirent* entry = is_found ? nullptr : readdir(files)) {
    ssize_t length = readlinkat(dirfd(files), entry->d_name, target, sizeof target);
    if (length != (ssize_t)link.size() || memcmp(target, link.data(), link.size())) continue;
    int file = openat(dirfd(files), entry->d_name, O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    is_found = pread(file, found, sizeof *found, 0) == (ssize_t)sizeof *found &&
               found->process == strtoull(process, nullptr, 10);
    close(file);
  }
  closedir(files);
  return is_found;
}

// Fills in the processes that use a physical device, this one first, and returns how many there are.
API int emulated_processes(int physical, unsigned* processes, uint64_t* bytes, int most) {
  int count = 0;
  auto add = [&](uint64_t process, const InUse& in_use) {
    if (!in_use.bytes[physical]) return;
    if (count < most) processes[count] = (unsigned)process, bytes[count] = in_use.bytes[physical];
    ++count;
  };
  std::string link;
  {
    std::lock_guard<std::mutex> guard(memory_mutex);
    add((uint64_t)getpid(), own);
    if (file_name.empty()) return count;
    link = "/memfd:" + file_name + " (deleted)";
  }
  DIR* all = opendir("/proc");
  if (!all) return count;
  while (dirent* entry = readdir(all)) {
    InUse found;
    if (*entry->d_name < '1' || *entry->d_name > '9' || atoi(entry->d_name) == getpid()) continue;
    if (read_process(entry->d_name, link, &found)) add(found.process, found);
  }
  closedir(all);
  return count;
}
