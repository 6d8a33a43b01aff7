// The functions of NCCL that torch calls. A call returns when its work is done, as everything on the
// emulated device, so that memory does not depend on timing. Only if that cannot be, because ranks wait for
// each other in a circle, or a rank does not come for some seconds, it returns earlier, as on a card.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>

#include "../profiling.hpp"
#include "collectives.hpp"
#include "log.hpp"
#include "reductions.hpp"
#include "../graphs.hpp"
#include "../waiting.hpp"

namespace {
constexpr int kLongestWait = 600;  // of 5 ms: 3 s

// ---- Groups: what is called in one is given together at its end ----

struct Bytes {
  const void* start = nullptr;
  size_t size = 0;
};
struct Given {
  Communicator* communicator;
  Stream stream;
  Communicator::Run run;                // empty for transfers
  std::vector<Transfer> transfers;
  std::vector<Bytes> sent, received;
};
struct Group {
  int depth = 0;
  std::vector<Given> given;
  std::vector<std::function<int()>> inits;
};
thread_local Group group;

int failed(int code, const std::string& problem) { return problem_of_this_thread() = problem, code; }

// Each in a thread of its own, because communicators of one process may wait for each other.
int run_inits(const std::vector<std::function<int()>>& inits) {
  if (inits.size() == 1) return inits[0]();
  std::vector<std::thread> threads;
  std::vector<int> codes(inits.size());
  std::vector<std::string> problems(inits.size());
  int device = current_device;
  for (size_t i = 0; i < inits.size(); ++i)
    threads.emplace_back([&, i] {
      current_device = device;
      codes[i] = inits[i]();
      problems[i] = problem_of_this_thread();
    });
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < codes.size(); ++i)
    if (codes[i]) return failed(codes[i], problems[i]);
  return kDone;
}

int cannot_send(const void* start, size_t bytes);
void note_received(const void* start, size_t bytes);
int record_in_graph(std::vector<Given> given);

bool may_go_on(const Jobs& jobs, int waits) {
  show_waiting(missing_of(jobs));
  bool is_late = waits > kLongestWait;
  for (const auto& job : jobs) is_late |= waits > 2 && job->is_late;
  for (const auto& job : jobs) job->is_late = job->is_late || is_late;
  return is_late || (waits > 2 && is_in_circle());
}
int wait_at_first(const Jobs& jobs) {
  wait_while(jobs, may_go_on);
  show_waiting({});
  for (const auto& job : jobs)
    if (job->is_done() && job->take_failure()) return failed(job->code(), job->problem());
  return kDone;
}

Jobs start_all(std::vector<Given> in_order) {
  Jobs jobs;
  for (auto& one : in_order) {
    int device = one.communicator->device();
    auto before = jobs_of(one.stream, device);
    bool is_late = std::any_of(before.begin(), before.end(), [](const auto& job) { return job->is_late && !job->is_done(); });
    auto transfers = one.transfers;
    if (!transfers.empty()) one.run = [transfers](Communicator& c) { return move(c, transfers); };
    auto job = one.communicator->start(std::move(one.run), std::move(before), std::move(one.transfers));
    job->is_late = is_late;
    give(one.stream, {job}, device);
    jobs.push_back(std::move(job));
  }
  return jobs;
}

int give_all() {
  auto inits = std::move(group.inits);
  auto given = std::move(group.given);
  group.inits.clear(), group.given.clear();
  if (!inits.empty())
    if (int code = run_inits(inits)) {
      // ProcessGroupNCCL2 does not ask for the reason.
      fprintf(stderr, "emulated_cuda: cannot create a communicator of NCCL: %s\n", problem_of_this_thread().c_str());
      return code;
    }
  // The transfers of a communicator move together, after its collectives.
  std::vector<Given> in_order;
  for (auto& one : given)
    if (one.transfers.empty()) in_order.push_back(std::move(one));
  size_t collectives = in_order.size();
  for (auto& one : given) {
    if (one.transfers.empty()) continue;
    size_t place = collectives;
    while (place < in_order.size() && in_order[place].communicator != one.communicator) ++place;
    if (place == in_order.size()) in_order.push_back({one.communicator, one.stream, {}, {}, {}, {}});
    in_order[place].transfers.push_back(one.transfers[0]);
    for (Bytes bytes : one.sent) in_order[place].sent.push_back(bytes);
    for (Bytes bytes : one.received) in_order[place].received.push_back(bytes);
  }
  for (auto& one : in_order) {
    ProfiledCallScope profiled(kCallLaunch);
    count_work();
    profiled.kernel("ncclDevKernel", one.stream);
  }
  if (!in_order.empty() && capture_of(in_order[0].stream)) return record_in_graph(std::move(in_order));
  return wait_at_first(start_all(std::move(in_order)));
}

int add(Communicator* communicator, Stream stream, Bytes sent, Bytes received, Communicator::Run run,
        std::vector<Transfer> transfers = {}) {
  if (!communicator) return failed(kInvalidArgument, "the communicator is null; call ncclCommInitRank first");
  bool is_sent_known = false;
  if (!capture_of(stream)) {  // otherwise a replay does
    if (int code = cannot_send(sent.start, sent.size)) return code;
    note_received(received.start, received.size);
    is_sent_known = !values_are_computed && sent.size <= kShortMessage && (!sent.size || is_known(sent.start, sent.size));
    if (!values_are_computed) forget_writes(received.start, received.size);  // often what is sent, too
  }
  uint64_t before = launches;
  for (Transfer& transfer : transfers) transfer.is_known = is_sent_known, transfer.launches = before;
  // Without values programs read sizes back that other ranks sent, as DDP its numbers of parameters.
  if (run)
    run = [=, run = std::move(run)](Communicator& c) {
      c.set_known(is_sent_known);
      int code = run(c);
      if (!code && received.size && received.size <= kShortMessage && c.are_known())
        note_write(received.start, received.size, before);
      return code;
    };
  if (int code = communicator->async_error()) return failed(code, communicator->problem());
  group.given.push_back({communicator, stream, std::move(run), std::move(transfers), {sent}, {received}});
  return group.depth ? (int)kDone : give_all();
}
int add_init(std::function<int()> init) {
  group.inits.push_back(std::move(init));
  return group.depth ? (int)kDone : give_all();
}

// ---- Values: what is sent must be known, and what is received is known (values/staleness.py) ----

using Asked = int (*)(const void* start, size_t bytes, int receives, char* problem, size_t room);
std::atomic<Asked> asked{nullptr};
int cannot_send(const void* start, size_t bytes) {
  char problem[512];
  Asked ask = asked;
  if (!ask || !bytes || !ask(start, bytes, 0, problem, sizeof problem)) return kDone;
  return failed(kInvalidUsage, problem);
}
void note_received(const void* start, size_t bytes) {
  if (Asked ask = asked; ask && bytes) ask(start, bytes, 1, nullptr, 0);
}

// ---- Calls that a CUDA graph captures: each replay makes them ----

std::mutex recorded_mutex;
std::vector<std::vector<Given>> recorded;

int record_in_graph(std::vector<Given> given) {
  std::lock_guard<std::mutex> guard(recorded_mutex);
  Stream stream = given[0].stream;
  recorded.push_back(std::move(given));
  record_work(stream, nullptr, (void*)recorded.size(), nullptr, 0);
  return kDone;
}
std::vector<Given> recorded_calls(size_t number) {
  std::lock_guard<std::mutex> guard(recorded_mutex);
  return recorded[number - 1];
}

// In the communicator's thread, and so after what it was given before.
int run_and_wait(Communicator* communicator, Communicator::Run run) {
  auto job = communicator->start(std::move(run), {});
  Jobs jobs{job};
  wait_while(jobs, [](const Jobs& waited, int) { return show_waiting(missing_of(waited)), false; });
  show_waiting({});
  job->take_failure();
  return job->code() ? failed(job->code(), job->problem()) : (int)kDone;
}
}  // namespace

API void emulated_ask_before_sending(Asked ask) { asked = ask; }
// Makes calls that a graph has captured, and waits for them. Returns why it cannot, or nullptr.
API const char* emulated_repeat_calls(size_t number) {
  auto given = recorded_calls(number);
  for (const auto& one : given) {
    if (one.communicator->is_over())
      return "the graph calls NCCL with a communicator that was destroyed; capture the graph again";
    for (Bytes bytes : one.sent)
      if (cannot_send(bytes.start, bytes.size)) return problem_of_this_thread().c_str();
    for (Bytes bytes : one.received) note_received(bytes.start, bytes.size);
  }
  Jobs jobs = start_all(std::move(given));
  wait_while(jobs, [](const Jobs& waited, int) { return show_waiting(missing_of(waited)), false; });
  show_waiting({});
  for (const auto& job : jobs)
    if (job->take_failure()) return (problem_of_this_thread() = job->problem()).c_str();
  return nullptr;
}
bool can_be_sent(const void* start, size_t bytes) { return !cannot_send(start, bytes); }

// ---- Communicators ----

struct Id {  // ncclUniqueId
  Offer offer;
  char unused[104];
};
static_assert(sizeof(Id) == 128, "torch passes it by value");

API int ncclGetVersion(int* version) { return *version = (int)settings.nccl_version, kDone; }
API int ncclGetUniqueId(Id* id) {
  memset(id, 0, sizeof *id);
  return make_offer(&id->offer) ? (int)kDone : failed(kSystemError, "cannot allocate shared memory for a communicator");
}
static int init(Communicator** out, int ranks, const Id& id, int rank) {
  *out = nullptr;
  int device = current_device;
  return add_init([=] { return Communicator::join(out, ranks, rank, id.offer, device); });
}
API int ncclCommInitRank(Communicator** out, int ranks, Id id, int rank) { return init(out, ranks, id, rank); }
API int ncclCommInitRankConfig(Communicator** out, int ranks, Id id, int rank, const Config* config) {
  log_config(config);
  return init(out, ranks, id, rank);
}
API int ncclCommInitRankScalable(Communicator** out, int ranks, int rank, int, Id* ids, const Config* config) {
  log_config(config);
  return init(out, ranks, ids[0], rank);
}
API int ncclCommInitAll(Communicator** out, int ranks, const int* devices) {
  Id id;
  if (int code = ncclGetUniqueId(&id)) return code;
  ++group.depth;
  for (int rank = 0; rank < ranks; ++rank) {
    int device = devices ? devices[rank] : rank;
    add_init([=] { return Communicator::join(out + rank, ranks, rank, id.offer, device); });
  }
  return --group.depth ? (int)kDone : give_all();
}
API int ncclCommSplit(Communicator* parent, int colour, int key, Communicator** out, const Config* config) {
  log_config(config);
  return add_init([=] { return run_and_wait(parent, [=](Communicator& c) { return c.split(colour, key, out); }); });
}
API int ncclCommShrink(Communicator* parent, int* excluded, int count, Communicator** out, void*, int flags) {
  constexpr int kAbort = 1;
  std::vector<int> ranks(excluded, excluded + count);
  if (flags & kAbort) return add_init([=] { return parent->shrink_aborted(ranks, out); });
  return add_init([=] { return run_and_wait(parent, [=](Communicator& c) { return c.shrink(ranks, out); }); });
}
// torch ends also a communicator whose initialization has not come to an end: then there is none.
API int ncclCommDestroy(Communicator* c) {
  if (c) c->destroy();
  return kDone;
}
API int ncclCommFinalize(Communicator*) { return kDone; }
API int ncclCommAbort(Communicator* c) {
  if (c) c->abort();
  return kDone;
}
API int ncclCommGetAsyncError(Communicator* c, int* code) {
  if (!c) return failed(kInvalidArgument, "the communicator is null; call ncclCommInitRank first");
  return *code = c->async_error(), kDone;
}
API int ncclCommCount(Communicator* c, int* count) { return *count = c->ranks(), kDone; }
API int ncclCommUserRank(Communicator* c, int* rank) { return *rank = c->rank(), kDone; }
API int ncclCommCuDevice(Communicator* c, int* device) { return *device = c->device(), kDone; }

// What NCCL allocates itself can be given back for a while; here that is nothing, on the device.
API int ncclCommSuspend(Communicator* c, int) {
  if (!c) return failed(kInvalidArgument, "the communicator is null; call ncclCommInitRank first");
  return c->is_suspended = true, kDone;
}
API int ncclCommResume(Communicator* c) {
  if (!c) return failed(kInvalidArgument, "the communicator is null; call ncclCommInitRank first");
  return c->is_suspended = false, kDone;
}
API int ncclCommMemStats(Communicator* c, int figure, uint64_t* value) {
  constexpr int kIsSuspended = 1;
  if (!c) return failed(kInvalidArgument, "the communicator is null; call ncclCommInitRank first");
  return *value = figure == kIsSuspended && c->is_suspended, kDone;
}

API const char* ncclGetErrorString(int code) {
  switch (code) {
    case kDone: return "no error";
    case kSystemError: return "unhandled system error";
    case kInternalError: return "internal error";
    case kInvalidArgument: return "invalid argument";
    case kInvalidUsage: return "invalid usage";
    case kRemoteError: return "remote process exited or there was a network error";
    default: return "unknown result code";
  }
}
API const char* ncclGetLastError(Communicator* c) {
  static thread_local std::string text;
  text = problem_of_this_thread();
  if (text.empty() && c) text = c->problem();
  return text.c_str();
}

// ---- Memory: registration has no effect, because nothing is sent by hardware ----

API int cudaMalloc(void**, size_t);
API int cudaFree(void*);
API int ncclMemAlloc(void** out, size_t size) { return cudaMalloc(out, size) ? 1 : kDone; }
API int ncclMemFree(void* pointer) { return cudaFree(pointer) ? 1 : kDone; }
API int ncclCommRegister(Communicator*, void*, size_t, void** handle) { return *handle = nullptr, kDone; }
API int ncclCommDeregister(Communicator*, void*) { return kDone; }

// ---- Calls ----

API int ncclGroupStart() { return ++group.depth, kDone; }
API int ncclGroupEnd() { return --group.depth ? (int)kDone : give_all(); }
API int ncclGroupSimulateEnd(void*) {
  return failed(kInvalidUsage, "the emulated NCCL does not know how long a group takes; measure it on a GPU");
}

API int ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, Communicator* c, Stream stream) {
  log_call({"AllReduce", send, recv, count, type, op, 0}, c, stream);
  size_t bytes = count * width_of(type);
  double factor = factor_of(op);
  return add(c, stream, {send, bytes}, {recv, bytes}, [=](Communicator& c) { return all_reduce(c, send, recv, count, type, op, factor); });
}
API int ncclReduce(const void* send, void* recv, size_t count, int type, int op, int root, Communicator* c, Stream stream) {
  log_call({"Reduce", send, recv, count, type, op, root}, c, stream);
  size_t bytes = count * width_of(type);
  double factor = factor_of(op);
  return add(c, stream, {send, bytes}, {recv, c->rank() == root ? bytes : 0}, [=](Communicator& c) { return reduce_to(c, send, recv, count, type, op, factor, root); });
}
API int ncclReduceScatter(const void* send, void* recv, size_t count, int type, int op, Communicator* c, Stream stream) {
  log_call({"ReduceScatter", send, recv, count, type, op, 0}, c, stream);
  size_t bytes = count * width_of(type);
  double factor = factor_of(op);
  return add(c, stream, {send, bytes * c->ranks()}, {recv, bytes}, [=](Communicator& c) { return reduce_scatter(c, send, recv, count, type, op, factor); });
}
API int ncclBroadcast(const void* send, void* recv, size_t count, int type, int root, Communicator* c, Stream stream) {
  log_call({"Broadcast", send, recv, count, type, 0, root}, c, stream);
  size_t bytes = count * width_of(type);
  bool is_root = c->rank() == root;
  size_t received = is_root && recv == send ? 0 : bytes;  // torch 2.15 gathers by broadcasts into other memory
  return add(c, stream, {send, is_root ? bytes : 0}, {recv, received}, [=](Communicator& c) { return broadcast(c, send, recv, count, type, root); });
}
API int ncclBcast(void* both, size_t count, int type, int root, Communicator* c, Stream stream) {
  return ncclBroadcast(both, both, count, type, root, c, stream);
}
API int ncclAllGather(const void* send, void* recv, size_t count, int type, Communicator* c, Stream stream) {
  log_call({"AllGather", send, recv, count, type, 0, 0}, c, stream);
  size_t bytes = count * width_of(type);
  return add(c, stream, {send, bytes}, {recv, bytes * c->ranks()}, [=](Communicator& c) { return all_gather(c, send, recv, count, type); });
}
API int ncclGather(const void* send, void* recv, size_t count, int type, int root, Communicator* c, Stream stream) {
  log_call({"Gather", send, recv, count, type, 0, root}, c, stream);
  size_t bytes = count * width_of(type);
  return add(c, stream, {send, bytes}, {recv, c->rank() == root ? bytes * c->ranks() : 0}, [=](Communicator& c) { return gather_to(c, send, recv, count, type, root); });
}
API int ncclAlltoAll(const void* send, void* recv, size_t count, int type, Communicator* c, Stream stream) {
  log_call({"AlltoAll", send, recv, count, type, 0, 0}, c, stream);
  size_t bytes = count * width_of(type) * c->ranks();
  return add(c, stream, {send, bytes}, {recv, bytes}, [=](Communicator& c) { return all_to_all(c, send, recv, count, type); });
}
API int ncclSend(const void* send, size_t count, int type, int peer, Communicator* c, Stream stream) {
  log_call({"Send", nullptr, send, count, type, 0, peer}, c, stream);
  return add(c, stream, {send, count * width_of(type)}, {}, {}, {{true, (char*)send, count * width_of(type), peer, 0, false, 0}});
}
API int ncclRecv(void* recv, size_t count, int type, int peer, Communicator* c, Stream stream) {
  log_call({"Recv", nullptr, recv, count, type, 0, peer}, c, stream);
  return add(c, stream, {}, {recv, count * width_of(type)}, {}, {{false, (char*)recv, count * width_of(type), peer, 0, false, 0}});
}

API int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int, Communicator*) {
  *op = add_factor(scalar, type);
  if (*op >= 0) return kDone;
  return failed(kInvalidArgument, "the factor of ncclRedOpCreatePreMulSum must be a floating-point number");
}
API int ncclRedOpDestroy(int op, Communicator*) { return remove_factor(op), kDone; }

// ---- What is not emulated ----

namespace symmetric {
constexpr const char* kAdvice =
    "Symmetric memory and one-sided calls of NCCL need GPUs: use the usual collectives, or send and recv.";
RAISED(ncclCommWindowRegister) RAISED(ncclCommWindowDeregister) RAISED(ncclWinGetUserPtr) RAISED(ncclDevCommCreate)
RAISED(ncclDevCommDestroy) RAISED(ncclGetLsaMultimemDevicePointer) RAISED(ncclGetPeerDevicePointer)
RAISED(ncclPutSignal) RAISED(ncclSignal) RAISED(ncclWaitSignal)
}  // namespace symmetric
namespace elastic {
constexpr const char* kAdvice = "Use ncclCommSplit, or new process groups.";
RAISED(ncclCommGrow) RAISED(ncclCommGetUniqueId) RAISED(ncclCommRevoke)
}  // namespace elastic
