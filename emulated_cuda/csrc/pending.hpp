// Work that is not done when it is given: collectives of NCCL, which wait for other processes. What is
// given to the same stream afterwards waits for it, as do events that are recorded behind it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "emulated.hpp"
#include "progress.hpp"

// One piece of work. Its result is known once it is done.
class Job {
 public:
  virtual ~Job() = default;
  bool is_done() const { return done_; }
  // 0, or the code with which it failed; `problem` says why.
  int code() const { return code_; }
  const std::string& problem() const { return problem_; }
  // `is_known`: no caller needs to learn of a failure.
  void finish(int code, std::string problem, bool is_known = false);
  // Whether it has failed and nobody has been told; the caller is told now.
  bool take_failure();
  bool has_unknown_failure() const { return !is_failure_known_; }
  std::atomic<bool> is_late{false};  // a process does not come for seconds; what follows does not wait for it again
  std::atomic<int> waiting{0};  // threads that execute nothing more before it is done
  // The processes without which it cannot be done, and which have not come yet.
  virtual std::vector<int64_t> missing() const { return {}; }
  virtual std::vector<int64_t> missing_itself() const { return {}; }  // without those of the jobs before it

 private:
  std::atomic<bool> done_{false};
  std::atomic<bool> is_failure_known_{true};
  int code_ = 0;
  std::string problem_;
};
using Jobs = std::vector<std::shared_ptr<Job>>;

// How many jobs are not done, or have failed and nobody knows. Streams are only looked up if there are any.
extern std::atomic<int> pending_jobs;

// The jobs that were given to a stream and are not done, or have failed and nobody knows.
Jobs jobs_of(Stream stream, int device = current_device);
void give(Stream stream, const Jobs& jobs, int device = current_device);
void forget_stream(Stream stream);
bool are_done(const Jobs& jobs);
std::vector<int64_t> missing_of(const Jobs& jobs);  // the processes that any of them misses
// Waits until all are done; returns an error of the runtime if one has failed and nobody knows.
int wait_for(const Jobs& jobs);
// Waits until all are done, or until `may_go_on` says so, which is asked every few milliseconds.
void wait_while(const Jobs& jobs, bool (*may_go_on)(const Jobs&, int waits));

// Lets a stream's earlier work be done before more is executed for it.
int wait_for_stream_slowly(Stream stream);
inline int wait_for_stream(Stream stream) {
  if (events_are_late) count_given(stream);
  return pending_jobs ? wait_for_stream_slowly(stream) : kSuccess;
}
int wait_for_device();
