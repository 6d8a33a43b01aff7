// How much memory this machine has left for what is written on the devices, as Linux and the control group
// of this process say.
#include "machine.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

namespace {
struct Memory {
  size_t total, available;
};
constexpr size_t kUnlimited = SIZE_MAX, kLeast = 128 * kMiB;
std::string root;  // before each path, for tests
Memory last;
size_t taken_since = 0;
std::chrono::steady_clock::time_point read_at;
thread_local char problem_text[512];
thread_local bool has_problem = false, is_problem_new = false;

// The number in a file of one number; kUnlimited if it says "max" or is not there.
size_t number_in(const std::string& path) {
  std::ifstream file(path);
  size_t number;
  return file >> number ? number : kUnlimited;
}
// The number behind a word at the start of a line; 0 if there is none.
size_t number_behind(const std::string& path, const char* word) {
  std::ifstream file(path);
  std::string name;
  size_t number;
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, strlen(word), word)) continue;
    number = strtoull(line.c_str() + strlen(word), nullptr, 10);
    return number;
  }
  return 0;
}

struct Names {  // of the files of a control group
  const char *limit, *usage, *cached;
};
constexpr Names kVersion1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file "};
constexpr Names kVersion2 = {"/memory.max", "/memory.current", "inactive_file "};

// Lowers `memory` to what a control group and those around it leave. Cached files are given back.
void limit(Memory& memory, const std::string& mount, std::string group, const Names& names, size_t swap) {
  for (;; group.erase(group.rfind('/'))) {
    std::string folder = root + mount + group;
    size_t most = number_in(folder + names.limit), used = number_in(folder + names.usage);
    if (most < memory.total && used != kUnlimited) {
      used -= std::min(used, number_behind(folder + "/memory.stat", names.cached));
      size_t more = std::min(swap, number_in(folder + "/memory.swap.max"));
      memory.total = most;
      memory.available = std::min(memory.available, most - std::min(most, used) + more);
    }
    if (group.empty()) return;
  }
}

Memory read_memory() {
  const std::string info = root + "/proc/meminfo";
  size_t swap = number_behind(info, "SwapFree:") * kKiB, total = number_behind(info, "MemTotal:") * kKiB;
  if (!total) return {kUnlimited, kUnlimited};  // no such file: nothing is known
  Memory memory = {total, number_behind(info, "MemAvailable:") * kKiB + swap};
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",", group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (controllers == ",,") limit(memory, "/sys/fs/cgroup", group, kVersion2, swap);
    if (controllers.find(",memory,") != std::string::npos)
      limit(memory, "/sys/fs/cgroup/memory", group, kVersion1, swap);
  }
  return memory;
}

// What must be available for `size` bytes. The CPU computes a result before it is copied to the device, so it
// may take twice the size. Not all of it may be written: as long as an eighth is available, nothing is refused.
size_t wanted(size_t size, const Memory& memory) {
  return std::max(kLeast, std::min(2 * size, memory.total / 8));
}
}  // namespace

bool machine_has(size_t size) {
  has_problem = is_problem_new = false;
  if (!values_are_computed || size > kUnlimited / 4) return true;
  auto now = std::chrono::steady_clock::now();
  // torch makes an expandable segment of many pieces at once, and they are not written before the last.
  bool is_old = now - read_at > std::chrono::milliseconds(50) || !last.total;
  if (is_old) taken_since = 0;
  size += taken_since;
  if (is_old || last.available / 2 < size || last.available - 2 * size < last.total / 8) {
    last = read_memory();
    if (is_old) read_at = now;
  }
  if (last.available >= wanted(size, last)) return taken_since = size, true;
  taken_since = 0;  // torch gives the pieces back
  has_problem = is_problem_new = true;
  snprintf(problem_text, sizeof problem_text,
           "out of memory of this machine, not of the emulated card: %zu MB were asked for, but only %zu of %zu MB are "
           "available. To measure memory only, compute no values (values=off, values=False or --no-values), which "
           "takes hardly any memory; otherwise use a smaller batch or a machine with more memory",
           size / kMiB, last.available / kMiB, last.total / kMiB);
  return false;
}
bool is_problem_of_machine_new() { return is_problem_new; }
const char* problem_of_machine() {
  is_problem_new = false;
  return has_problem ? problem_text : nullptr;
}

// Reads the files of a machine below `folder`, for tests; "" for this one.
API void emulated_machine_at(const char* folder) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  root = folder;
  last = {};
}
