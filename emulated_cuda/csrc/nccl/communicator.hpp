// A communicator: memory that its ranks share, and a thread of this process that does its work in order.
//
// Device memory of a rank is host memory of its process. So a collective writes into the shared memory
// what the others need, and reads what they have written: see collectives.cpp.
//
// Device memory that NCCL itself allocates on a card, such as its buffers, is in no figure. What processes with
// NCCL were seen to use beside the allocator's reserve is in cards.py (outside_reserve_of).
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

#include "../pending.hpp"

enum Result : int {  // ncclResult_t
  kDone = 0,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};
enum Type : int {  // ncclDataType_t
  kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64, kBfloat16, kFloat8e4m3, kFloat8e5m2,
};
enum Op : int { kSum, kProd, kMax, kMin, kAvg, kFirstOwnOp };  // ncclRedOp_t

constexpr int kMostRanks = 64;
constexpr size_t kSlot = 512 * kKiB;     // what a rank shows the others at a time
constexpr size_t kRing = 1024 * kKiB;    // what is on its way from one rank to another
constexpr size_t kShortMessage = 64 * kKiB;  // moved also without values: pickled objects, sizes

// A call, as all ranks must make it.
struct Call {
  char name[32];
  int64_t count;
  int32_t type, op, root;
  int32_t is_known;  // whether this rank knows what it sends, or sends nothing; the ranks need not agree
};
std::string described(const Call& call);

enum State : int { kNotHere, kHere, kDestroyed, kAborted };

// What each rank shows of itself.
struct Record {
  std::atomic<int64_t> process;    // this_process() of waiting.hpp
  std::atomic<int> state;
  std::atomic<int> card;           // index of its device, before CUDA_VISIBLE_DEVICES
  std::atomic<uint64_t> node;      // the same for ranks that use the same devices
  std::atomic<uint32_t> given;     // calls that it has been given
  std::atomic<uint32_t> met;       // meetings that it has come to
  std::atomic<int64_t> colour_key; // ncclCommSplit
  std::atomic<uint32_t> offers[2]; // number of the last ncclCommSplit, ncclCommShrink that it has made one for
  std::atomic<int64_t> offered;    // process and file of that
  std::atomic<uint64_t> token;     // and its random number
  Call calls[2];                   // the last, and the one before
  char problem[400];               // why it has aborted
};

// Messages from one rank to another, in order.
struct Ring {
  std::atomic<uint64_t> written, read;
  std::atomic<uint32_t> sends, receives;  // how many have been given
  char data[kRing];
};

struct Segment {
  uint64_t token;              // a random number, so that no other file is taken for this one
  std::atomic<uint32_t> bell;  // rises whenever anything changes; waiting ranks sleep until then
  std::atomic<int> ranks;
  Record records[kMostRanks];
};

struct Transfer {
  bool sends;
  char* at;
  size_t bytes;
  int peer;
  uint32_t number;    // among those between the two ranks
  bool is_known;      // what is sent
  uint64_t launches;  // before this one
};

// Memory for a new communicator: a file of a process, and a random number that stands in it.
struct Offer {
  int64_t process, file;
  uint64_t token;
};
bool make_offer(Offer* offer);

std::string& problem_of_this_thread();  // the text of its last error

class Communicator {
 public:
  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  int device() const { return device_; }

  // ---- Meetings, from the communicator's own thread ----

  // Waits until every rank has come to this meeting; the first of a call compares the calls of all.
  // If `needs_others` is false, a rank that has ended, or has destroyed the communicator, is no error.
  int meet(const Call* call = nullptr, bool needs_others = true);
  // What the next call sends is known, or not; and whether all that was sent in the last call is.
  void set_known(bool known) { is_known_ = known; }
  bool are_known() const { return are_known_; }
  // Waits until `is_over`, and looks now and then whether `missing`, a rank or -1 for any, has ended.
  int wait_until(const std::function<bool()>& is_over, const std::function<int()>& missing, const char* what,
                 bool needs_others = true);
  // The memory in which this rank shows something at the next meeting, and where the others do.
  char* own_slot() { return slot(rank_); }
  char* slot(int rank) { return base_ + kHeader + ((size_t)rank * 2 + half_) * kSlot; }
  void use_other_slots() { half_ ^= 1; }
  Ring& ring(int from, int to);
  Record& record(int rank) { return segment().records[rank]; }
  Segment& segment() { return *(Segment*)base_; }
  void ring_bell();
  int fail(Result code, const std::string& text);
  int fail_all(Result code, const std::string& text);  // the other ranks, too
  const std::string& problem() const { return problem_; }

  // ---- Work ----

  using Run = std::function<int(Communicator&)>;
  // Has the thread do this once `before` is done. `transfers` tells for whom it may wait.
  std::shared_ptr<Job> start(Run run, Jobs before, std::vector<Transfer> transfers = {});
  std::vector<int64_t> missing_for(uint32_t number, const std::vector<Transfer>& transfers);
  int async_error() const { return error_; }
  uint32_t calls_given() const { return given_; }
  void abort();
  void destroy();
  bool is_over() {
    std::lock_guard<std::mutex> guard(mutex_);
    return is_ending_;
  }
  std::atomic<bool> is_suspended{false};

  // ---- Communicators made from others ----

  static int join(Communicator** out, int ranks, int rank, const Offer& offer, int device);
  int split(int colour, int key, Communicator** out);
  int shrink(const std::vector<int>& excluded, Communicator** out);
  // The same if this communicator's work may never end. The excluded ranks may have ended.
  int shrink_aborted(const std::vector<int>& excluded, Communicator** out);

 private:
  static constexpr size_t kHeader = 128 * kKiB;
  static size_t bytes(int ranks);
  int come();
  int make_from_members(const std::vector<int>& members, int kind, Communicator** out);
  void unmap();
  std::string who_is_missing(const std::function<int()>& missing);
  void work();

  int ranks_ = 0, rank_ = 0, device_ = 0, half_ = 0;
  char* base_ = nullptr;
  uint32_t meetings_ = 0, calls_ = 0;
  bool is_known_ = false, are_known_ = false;
  uint32_t made_[2] = {0, 0};  // how many ncclCommSplit, ncclCommShrink there were
  std::string problem_;  // of the last failure in the communicator's thread
  std::atomic<int> error_{0};
  std::atomic<bool> is_aborted_{false};
  std::vector<int> excluded_;  // ranks that nobody waits for any more

  struct Queued;
  Job* current_ = nullptr;  // what the communicator's thread does
  bool is_program_handling_errors_ = false;  // with TORCH_NCCL_ASYNC_ERROR_HANDLING=0 it may abort, and go on
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Queued>> queue_;
  bool has_thread_ = false, is_ending_ = false;
  uint32_t given_ = 0;
};
