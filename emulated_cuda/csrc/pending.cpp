// See pending.hpp. All state is never destroyed, because threads may use it while the process ends.
#include "pending.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "waiting.hpp"

std::atomic<int> pending_jobs{0};

namespace {
struct State;
State& state();
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  // Default streams are small numbers, and differ from device to device.
  std::map<std::pair<int, Stream>, Jobs> streams;
};
State* made() {
  // A forked child has none of the threads that do the work.
  static auto unlock = [] { state().mutex.unlock(); };
  pthread_atfork([] { state().mutex.lock(); }, [] { unlock(); }, [] { pending_jobs = 0, unlock(); });
  return new State;
}
State& state() {
  static State* only = made();
  return *only;
}
std::pair<int, Stream> key_of(Stream stream, int device) {
  bool is_default = (uintptr_t)stream < 16;
  return {is_default ? device : -1, stream};
}

Jobs left_of(Jobs& jobs) {
  auto is_over = [](const auto& job) { return job->is_done() && !job->has_unknown_failure(); };
  jobs.erase(std::remove_if(jobs.begin(), jobs.end(), is_over), jobs.end());
  return jobs;
}

// Lets other threads run Python while this one waits, if it holds Python's lock.
class WithoutPython {
 public:
  WithoutPython() {
    static auto is_held = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
    static auto is_initialized = (int (*)())dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    static auto save = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    if (is_held && is_initialized && save && is_initialized() && is_held()) thread_ = save();
  }
  ~WithoutPython() {
    static auto restore = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    if (thread_) restore(thread_);
  }

 private:
  void* thread_ = nullptr;
};
}  // namespace

void Job::finish(int code, std::string problem, bool is_known) {
  std::lock_guard<std::mutex> guard(state().mutex);
  code_ = code;
  problem_ = std::move(problem);
  is_failure_known_ = !code || is_known;
  done_ = true;
  if (is_failure_known_) --pending_jobs;
  state().changed.notify_all();
}

bool Job::take_failure() {
  if (is_failure_known_.exchange(true)) return false;
  --pending_jobs;
  return true;
}

Jobs jobs_of(Stream stream, int device) {
  if (!pending_jobs) return {};
  std::lock_guard<std::mutex> guard(state().mutex);
  auto found = state().streams.find(key_of(stream, device));
  return found == state().streams.end() ? Jobs() : left_of(found->second);
}
void give(Stream stream, const Jobs& jobs, int device) {
  if (jobs.empty()) return;
  std::lock_guard<std::mutex> guard(state().mutex);
  Jobs& before = state().streams[key_of(stream, device)];
  left_of(before);
  for (const auto& job : jobs)
    if (std::find(before.begin(), before.end(), job) == before.end()) before.push_back(job);
}
void forget_stream(Stream stream) {
  std::lock_guard<std::mutex> guard(state().mutex);
  state().streams.erase(key_of(stream, current_device));
}

bool are_done(const Jobs& jobs) {
  return std::all_of(jobs.begin(), jobs.end(), [](const auto& job) { return job->is_done(); });
}
void wait_while(const Jobs& jobs, bool (*may_go_on)(const Jobs&, int waits)) {
  if (are_done(jobs)) return;
  WithoutPython released;
  std::unique_lock<std::mutex> lock(state().mutex);
  for (int waits = 0; !are_done(jobs); ++waits) {
    if (state().changed.wait_for(lock, std::chrono::milliseconds(5), [&] { return are_done(jobs); })) return;
    lock.unlock();
    if (may_go_on(jobs, waits)) return;
    lock.lock();
  }
}
std::vector<int64_t> missing_of(const Jobs& jobs) {
  std::vector<int64_t> missing;
  for (const auto& job : jobs)
    if (!job->is_done())
      for (int64_t process : job->missing()) missing.push_back(process);
  return missing;
}
int wait_for(const Jobs& jobs) {
  if (jobs.empty()) return kSuccess;
  for (const auto& job : jobs) ++job->waiting;
  if (!are_done(jobs)) wait_while(jobs, [](const Jobs& waited, int) { return show_waiting(missing_of(waited)), false; });
  for (const auto& job : jobs) --job->waiting;
  show_waiting({});
  for (const auto& job : jobs)
    if (job->take_failure()) return fail_work(job->problem().c_str());
  return kSuccess;
}
int wait_for_stream_slowly(Stream stream) { return wait_for(jobs_of(stream)); }
int wait_for_device() {
  if (events_are_late) host_has_waited_for_device();
  if (!pending_jobs) return kSuccess;
  Jobs all;
  {
    std::lock_guard<std::mutex> guard(state().mutex);
    for (auto& entry : state().streams)
      for (const auto& job : left_of(entry.second)) all.push_back(job);
  }
  return wait_for(all);
}
