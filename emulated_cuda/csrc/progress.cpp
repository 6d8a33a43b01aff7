// See progress.hpp. The state is never destroyed, because threads may use it while the process ends.
#include "progress.hpp"

#include <map>
#include <mutex>
#include <utility>

bool events_are_late = false;

namespace {
// Launches that CUDA holds for a stream at most; a further one waits for the first of them.
constexpr uint64_t kMostPending = 1024;

struct Progress {
  int device = 0;
  uint64_t given = 0, done = 0;
  std::vector<std::pair<uint64_t, Place>> waits;  // behind how many pieces, and for what
};
using Key = std::pair<int, Stream>;
struct State {
  std::mutex mutex;
  std::map<Key, Progress> streams;
};
State& state() {
  static State* only = new State;
  return *only;
}
Key key_of(Stream stream) {
  bool is_default = (uintptr_t)stream < 16;
  return {is_default ? current_device : -1, stream};
}

Progress& progress_of(const Key& key) {
  auto [found, is_new] = state().streams.try_emplace(key);
  if (is_new) found->second.device = current_device;
  return found->second;
}

// Hold the mutex, here and below.
void finish(const Key& key, uint64_t number) {
  std::vector<std::pair<Key, uint64_t>> left{{key, number}};
  while (!left.empty()) {
    auto [next, end] = left.back();
    left.pop_back();
    auto found = state().streams.find(next);
    if (found == state().streams.end() || end <= found->second.done) continue;
    Progress& progress = found->second;
    progress.done = end;
    auto wait = progress.waits.begin();
    for (; wait != progress.waits.end() && wait->first < end; ++wait)
      left.push_back({{wait->second.device, wait->second.stream}, wait->second.number});
    progress.waits.erase(progress.waits.begin(), wait);
  }
}
}  // namespace

API void emulated_set_late_events(int on) { events_are_late = on; }

void count_given(Stream stream) {
  std::lock_guard<std::mutex> guard(state().mutex);
  Key key = key_of(stream);
  Progress& progress = progress_of(key);
  if (++progress.given > progress.done + kMostPending) finish(key, progress.given - kMostPending);
}
Place place_of(Stream stream) {
  std::lock_guard<std::mutex> guard(state().mutex);
  Key key = key_of(stream);
  return {key.first, stream, progress_of(key).given};
}
bool has_come_to(const Place& place) {
  std::lock_guard<std::mutex> guard(state().mutex);
  auto found = state().streams.find({place.device, place.stream});
  return found == state().streams.end() || place.number <= found->second.done;
}
void let_wait(Stream stream, const Place& place) {
  if (has_come_to(place)) return;
  std::lock_guard<std::mutex> guard(state().mutex);
  Progress& progress = progress_of(key_of(stream));
  progress.waits.push_back({progress.given++, place});  // the wait is a piece of work itself
}
void host_has_waited_for(const Place& place) {
  std::lock_guard<std::mutex> guard(state().mutex);
  finish({place.device, place.stream}, place.number);
}
void host_has_waited_for_device() {
  std::lock_guard<std::mutex> guard(state().mutex);
  for (auto& [key, progress] : state().streams)
    if (progress.device == current_device) finish(key, progress.given);
}
void forget_progress(Stream stream) {
  std::lock_guard<std::mutex> guard(state().mutex);
  state().streams.erase(key_of(stream));
}
