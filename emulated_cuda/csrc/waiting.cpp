// See waiting.hpp.
#include "waiting.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "shared_memory.hpp"

namespace {
constexpr int kMostMissing = 64;
// For which processes a process waits, over all of its threads; 0 ends the list.
struct Page {
  std::atomic<int64_t> missing[kMostMissing];
};
struct State {
  std::mutex mutex;
  Page* page = nullptr;
  int64_t process = 0;
  std::map<std::thread::id, std::vector<int64_t>> waits;  // of each thread
  std::map<int64_t, const Page*> others;
};
State* only;
void forget_parent() { only = new State; }  // a forked child has a page of its own

State& state() {
  static std::once_flag once;
  std::call_once(once, [] {
    only = new State;
    pthread_atfork([] { only->mutex.lock(); }, [] { only->mutex.unlock(); }, forget_parent);
  });
  return *only;
}
int64_t process_of(State& own) {
  if (own.process) return own.process;
  int file = shared_file();
  void* start = file < 0 ? nullptr : map_shared(file, sizeof(Page));
  if (!start) return 0;
  own.page = (Page*)start;
  return own.process = (int64_t)getpid() << 32 | file;
}
const Page* page_of(State& own, int64_t process) {
  auto found = own.others.find(process);
  if (found != own.others.end()) return found->second;
  int file = open_of_process(pid_of(process), (int)process);
  void* start = file < 0 ? nullptr : map_shared(file, sizeof(Page));
  if (file >= 0) close(file);
  return own.others[process] = (const Page*)start;
}
}  // namespace

int64_t this_process() {
  State& own = state();
  std::lock_guard<std::mutex> guard(own.mutex);
  return process_of(own);
}

void show_waiting(const std::vector<int64_t>& missing) {
  State& own = state();
  std::lock_guard<std::mutex> guard(own.mutex);
  if (!own.page) return;
  if (missing.empty()) own.waits.erase(std::this_thread::get_id());
  else own.waits[std::this_thread::get_id()] = missing;
  std::set<int64_t> all;
  for (const auto& wait : own.waits) all.insert(wait.second.begin(), wait.second.end());
  size_t place = 0;
  for (int64_t process : all)
    if (place < kMostMissing) own.page->missing[place++] = process;
  if (place < kMostMissing) own.page->missing[place] = 0;
}

bool is_in_circle() {
  State& own = state();
  std::lock_guard<std::mutex> guard(own.mutex);
  if (!own.page) return false;
  std::set<int64_t> seen;
  std::vector<int64_t> next;
  auto add_missing_of = [&](const Page* page) {
    for (const auto& entry : page->missing) {
      int64_t process = entry;
      if (!process) break;
      if (seen.insert(process).second) next.push_back(process);
    }
  };
  add_missing_of(own.page);
  while (!next.empty()) {
    int64_t process = next.back();
    next.pop_back();
    if (process == own.process) return true;
    if (const Page* page = page_of(own, process)) add_missing_of(page);
  }
  return false;
}

bool has_ended(int pid) {
  char path[64], line[512];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return true;
  ssize_t size = read(file, line, sizeof line - 1);
  close(file);
  if (size <= 0) return true;
  line[size] = 0;
  const char* name_end = strrchr(line, ')');  // the name may have any characters
  char status = name_end && name_end[1] ? name_end[2] : 'X';
  return status == 'Z' || status == 'X';
}
