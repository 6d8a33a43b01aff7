// See communicator.hpp.
#include "communicator.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "../shared_memory.hpp"
#include "../waiting.hpp"

static_assert(sizeof(Segment) <= 128 * kKiB, "the slots follow it");

// ---- Files of communicators that are not complete ----

static std::mutex files_mutex;
static std::set<int> offered_files;

bool make_offer(Offer* offer) {
  int made = shared_file();
  if (made < 0) return false;
  *offer = {getpid(), made, 0};
  if (getrandom(&offer->token, sizeof offer->token, 0) < 0 ||
      write(made, &offer->token, sizeof offer->token) != sizeof offer->token)
    return close(made), false;
  std::lock_guard<std::mutex> guard(files_mutex);
  offered_files.insert(made);
  return true;
}
static void close_offered(int file) {
  std::lock_guard<std::mutex> guard(files_mutex);
  if (offered_files.erase(file)) close(file);
}

// ---- Joining ----

// What stands for the machine of this process, as NCCL_HOSTID does for NCCL: torchrun's nodes may run on one machine.
static uint64_t node_of_this_process() {
  const char* name = getenv("NCCL_HOSTID");
  if (!name) name = getenv("GROUP_RANK");
  return std::hash<std::string>()(name ? name : "");
}

// Whether PyTorch does nothing when a communicator fails, because the program does.
static bool are_errors_handled_by_program() {
  const char* mode = getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  return mode && strcmp(mode, "0") == 0;
}

size_t Communicator::bytes(int ranks) {
  size_t pairs = (size_t)ranks * ranks;
  return kHeader + (size_t)ranks * 2 * kSlot + pairs * round_up(sizeof(Ring), 4096);
}
Ring& Communicator::ring(int from, int to) {
  size_t pair = (size_t)from * ranks_ + to;
  return *(Ring*)(base_ + kHeader + (size_t)ranks_ * 2 * kSlot + pair * round_up(sizeof(Ring), 4096));
}

int Communicator::join(Communicator** out, int ranks, int rank, const Offer& offer, int device) {
  *out = nullptr;
  auto* made = new Communicator;
  made->ranks_ = ranks, made->rank_ = rank, made->device_ = device;
  made->is_program_handling_errors_ = are_errors_handled_by_program();
  if (ranks > kMostRanks)
    return made->fail(kInvalidUsage, "the emulated NCCL has at most 64 ranks, got " + std::to_string(ranks));
  bool is_own = offer.process == getpid();
  int opened = is_own ? (int)offer.file : open_of_process((int)offer.process, (int)offer.file);
  if (opened >= 0) made->base_ = (char*)map_shared(opened, bytes(ranks));
  if (opened >= 0 && !is_own) close(opened);
  if (!made->base_ || made->segment().token != offer.token)
    return made->fail(kSystemError, "the rank that made this communicator (process " + std::to_string(offer.process) +
                                        ") has ended, or runs on another machine or as another user; run all "
                                        "ranks on one machine as one user");
  int code = made->come();
  if (is_own) close_offered((int)offer.file);
  if (code) return code;
  *out = made;
  return kDone;
}

int Communicator::come() {
  Record& own = record(rank_);
  own.process = this_process();
  own.card = visible_devices()[device_];
  own.node = node_of_this_process();
  own.state = kHere;
  ring_bell();
  auto first_missing = [this] {
    for (int rank = 0; rank < ranks_; ++rank)
      if (record(rank).state == kNotHere) return rank;
    return -1;
  };
  const char* what = "the initialization of the communicator";
  if (int code = wait_until([&] { return first_missing() < 0; }, first_missing, what)) return code;
  for (int second = 1; second < ranks_; ++second)
    for (int first = 0; first < second; ++first)
      if (record(first).card == record(second).card && record(first).node == record(second).node)
        return fail(kInvalidUsage, "duplicate GPU: rank " + std::to_string(first) + " and rank " + std::to_string(second) +
                                       " both use device " + std::to_string(record(first).card) +
                                       "; call torch.cuda.set_device with another device on each rank, or set another NCCL_HOSTID "
                                       "for ranks that stand for another machine");
  return kDone;
}

// ---- Waiting ----

void Communicator::ring_bell() {
  ++segment().bell;
  syscall(SYS_futex, &segment().bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

static thread_local std::string last_problem;
std::string& problem_of_this_thread() { return last_problem; }

int Communicator::fail(Result code, const std::string& text) {
  problem_ = last_problem = text;
  if (code == kRemoteError || code == kInternalError) error_ = code;
  return code;
}

int Communicator::fail_all(Result code, const std::string& text) {
  Record& own = record(rank_);
  strncpy(own.problem, text.c_str(), sizeof own.problem - 1);
  own.state = kAborted;
  ring_bell();
  error_ = code;
  return fail(code, text);
}

// Why this rank waits in vain; empty if there is hope.
std::string Communicator::who_is_missing(const std::function<int()>& missing) {
  int first_missing = missing();
  for (int rank = 0; rank < ranks_; ++rank) {
    if (std::find(excluded_.begin(), excluded_.end(), rank) != excluded_.end()) continue;
    Record& other = record(rank);
    std::string name = "rank " + std::to_string(rank) + " of " + std::to_string(ranks_);
    if (other.state == kAborted && rank != rank_)
      return name + " has aborted this communicator" + (other.problem[0] ? std::string(": ") + other.problem : "");
    if (other.state == kDestroyed && rank != first_missing) continue;
    if (other.state == kDestroyed) return name + " has destroyed this communicator";
    int pid = pid_of(other.process);
    if (pid && pid != getpid() && has_ended(pid)) return name + " (process " + std::to_string(pid) + ") has ended";
  }
  return "";
}

int Communicator::wait_until(const std::function<bool()>& is_over, const std::function<int()>& missing,
                             const char* what, bool needs_others) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kTimeToAbort = std::chrono::seconds(3);
  Clock::time_point found;
  for (int turns = 0;; ++turns) {
    uint32_t bell = segment().bell;
    if (is_over()) return kDone;
    if (is_aborted_)
      return fail(kRemoteError, "rank " + std::to_string(rank_) + " has aborted the communicator, probably after its timeout, while it "
                                "waited for rank " + std::to_string(std::max(missing(), 0)) + " in " + what);
    if (turns < 20) {
      sched_yield();
      continue;
    }
    timespec longest = {0, 50'000'000};
    syscall(SYS_futex, &segment().bell, FUTEX_WAIT, bell, &longest, nullptr, 0);
    if (segment().bell != bell) continue;  // something has changed
    std::string problem = who_is_missing(missing);
    if (problem.empty() || is_over()) continue;
    if (!needs_others) return kDone;
    // On a card the call has returned, and what needs its result waits. A program that handles errors has time to abort.
    bool is_first = !error_;
    int code = is_first ? fail(kRemoteError, problem + ", while rank " + std::to_string(rank_) + " waited for it in " + what)
                        : error_.load();
    if (!current_ || !is_program_handling_errors_) return code;
    if (is_first) current_->is_late = true, found = Clock::now();
    if (Clock::now() - found > kTimeToAbort) return code;
  }
}

std::string described(const Call& call) {
  static const char* const types[] = {"int8",  "uint8",   "int32",   "uint32",   "int64",         "uint64",
                                      "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"};
  static const char* const ops[] = {"sum", "product", "maximum", "minimum", "average"};
  std::string text = call.name;
  if (call.type >= 0) text += " of " + std::to_string(call.count) + " " + types[call.type];
  if (call.op >= 0) text += std::string(" (") + (call.op < kFirstOwnOp ? ops[call.op] : "scaled sum") + ")";
  if (call.root >= 0) text += " with root " + std::to_string(call.root);
  return text;
}

int Communicator::meet(const Call* call, bool needs_others) {
  Record& own = record(rank_);
  if (call) own.calls[++calls_ % 2] = *call, own.calls[calls_ % 2].is_known = is_known_;
  uint32_t meeting = ++meetings_;
  own.met = meeting;
  ring_bell();
  auto first_missing = [&] {
    for (int rank = 0; rank < ranks_; ++rank)
      if ((int32_t)(record(rank).met - meeting) < 0) return rank;
    return -1;
  };
  std::string what = call ? described(*call) : own.calls[calls_ % 2].name;
  if (int code = wait_until([&] { return first_missing() < 0; }, first_missing, what.c_str(), needs_others)) return code;
  bool have_all_come = first_missing() < 0;
  if (call) are_known_ = is_known_;  // a root need not wait for those that send nothing
  for (int rank = 0; call && have_all_come && rank < ranks_; ++rank) {
    const Call& other = record(rank).calls[calls_ % 2];
    are_known_ = are_known_ && other.is_known;
    if (memcmp(&other, call, offsetof(Call, is_known)))
      return fail(kInvalidUsage, "the ranks call different collectives: rank " + std::to_string(rank_) + " calls " +
                                     described(*call) + ", but rank " + std::to_string(rank) + " calls " + described(other));
  }
  return kDone;
}

// ---- Work ----

struct Communicator::Queued : Job {
  Communicator* owner;
  Run run;
  Jobs before;
  std::vector<Transfer> transfers;
  uint32_t number;
  std::vector<int64_t> missing_itself() const override { return owner->missing_for(number, transfers); }
  // What the jobs before wait for stands before, too: a stream's list is complete.
  std::vector<int64_t> missing() const override {
    auto found = missing_itself();
    for (const auto& job : before)
      if (!job->is_done())
        for (int64_t process : job->missing_itself()) found.push_back(process);
    return found;
  }
};

std::vector<int64_t> Communicator::missing_for(uint32_t number, const std::vector<Transfer>& transfers) {
  std::vector<int64_t> found;
  std::lock_guard<std::mutex> guard(mutex_);
  if (!base_) return found;
  if (transfers.empty())
    for (int rank = 0; rank < ranks_; ++rank)
      if ((int32_t)(record(rank).given - number) < 0) found.push_back(record(rank).process);
  for (const Transfer& transfer : transfers) {
    Ring& way = transfer.sends ? ring(rank_, transfer.peer) : ring(transfer.peer, rank_);
    uint32_t given = transfer.sends ? way.receives : way.sends;
    if ((int32_t)(given - transfer.number) < 0) found.push_back(record(transfer.peer).process);
  }
  return found;
}

std::shared_ptr<Job> Communicator::start(Run run, Jobs before, std::vector<Transfer> transfers) {
  auto job = std::make_shared<Queued>();
  job->owner = this;
  job->run = std::move(run);
  job->before = std::move(before);
  ++pending_jobs;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (Transfer& transfer : transfers) {
      Ring& way = transfer.sends ? ring(rank_, transfer.peer) : ring(transfer.peer, rank_);
      transfer.number = transfer.sends ? ++way.sends : ++way.receives;
    }
    job->transfers = std::move(transfers);
    if (job->transfers.empty()) job->number = record(rank_).given = ++given_;
    queue_.push_back(job);
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { work(); }).detach();
    }
  }
  ring_bell();
  changed_.notify_all();
  return job;
}

void Communicator::work() {
  current_device = device_;
  for (;;) {
    std::shared_ptr<Queued> job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty() || is_ending_; });
      if (queue_.empty()) break;
      job = queue_.front();
      queue_.pop_front();
    }
    wait_while(job->before, [](const Jobs&, int) { return false; });
    current_ = job.get();
    int code = error_ ? error_.load() : job->run(*this);
    current_ = nullptr;
    job->run = nullptr;  // what it holds
    // A process that has aborted it knows; only a thread that waits for a result must not go on without one,
    // unless the program handles errors: then it goes on, as on a card.
    bool is_known = is_aborted_ && (!job->waiting || is_program_handling_errors_);
    job->finish(code, code ? problem_ : "", is_known);
  }
  std::lock_guard<std::mutex> guard(mutex_);
  unmap();
}

// The object stays, for jobs that refer to it.
void Communicator::unmap() {
  munmap(base_, bytes(ranks_));
  base_ = nullptr;
}

void Communicator::abort() {
  is_aborted_ = true;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (base_) record(rank_).state = kAborted, ring_bell();
  }
  destroy();
}

void Communicator::destroy() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (is_ending_) return;
  is_ending_ = true;
  int here = kHere;
  record(rank_).state.compare_exchange_strong(here, kDestroyed);
  ring_bell();
  changed_.notify_all();
  if (!has_thread_) unmap();
}

// ---- Communicators made from others ----

enum Kind { kBySplit, kByShrink };

int Communicator::split(int colour, int key, Communicator** out) {
  *out = nullptr;
  record(rank_).colour_key = (int64_t)colour << 32 | (uint32_t)key;
  Call call{"ncclCommSplit", 0, -1, -1, -1, 0};
  if (int code = meet(&call)) return code;
  std::vector<std::pair<int, int>> members;  // key and rank
  for (int rank = 0; rank < ranks_; ++rank) {
    int64_t word = record(rank).colour_key;
    if ((int)(word >> 32) == colour) members.push_back({(int)(uint32_t)word, rank});
  }
  if (int code = meet()) return code;  // all have read
  if (colour < 0) return ++made_[kBySplit], kDone;
  std::sort(members.begin(), members.end());
  std::vector<int> in_order;
  for (const auto& member : members) in_order.push_back(member.second);
  return make_from_members(in_order, kBySplit, out);
}

int Communicator::shrink(const std::vector<int>& excluded, Communicator** out) {
  *out = nullptr;
  std::vector<int> members;
  for (int rank = 0; rank < ranks_; ++rank)
    if (std::find(excluded.begin(), excluded.end(), rank) == excluded.end()) members.push_back(rank);
  return make_from_members(members, kByShrink, out);
}

int Communicator::shrink_aborted(const std::vector<int>& excluded, Communicator** out) {
  is_aborted_ = true;  // the work that has begun ends, and so does its thread's use of the memory
  ring_bell();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!base_) return fail(kInvalidUsage, "this communicator was destroyed; create a new one");
  }
  if (has_thread_) {
    auto last = start([](Communicator&) { return (int)kDone; }, {});
    wait_while({last}, [](const Jobs&, int) { return false; });
    last->take_failure();
  }
  is_aborted_ = false, error_ = 0, excluded_ = excluded;
  int code = shrink(excluded, out);
  is_aborted_ = true;
  return code;
}

// The first member offers memory to the others.
int Communicator::make_from_members(const std::vector<int>& members, int kind, Communicator** out) {
  uint32_t number = ++made_[kind];
  int place = (int)(std::find(members.begin(), members.end(), rank_) - members.begin());
  Record& first = record(members[0]);
  Offer offer;
  if (place == 0) {
    if (!make_offer(&offer)) return fail(kSystemError, "cannot allocate shared memory for a communicator");
    first.offered = offer.process << 32 | offer.file;
    first.token = offer.token;
    first.offers[kind] = number;
    ring_bell();
  } else {
    auto is_offered = [&] { return (int32_t)(first.offers[kind] - number) >= 0; };
    auto missing = [&] { return members[0]; };
    if (int code = wait_until(is_offered, missing, kind == kBySplit ? "ncclCommSplit" : "ncclCommShrink")) return code;
    offer = {first.offered >> 32, first.offered & 0xffffffff, first.token};
  }
  return join(out, (int)members.size(), place, offer, device_);
}
