// CUDA graphs: a stream that captures executes nothing. Python records what it would have computed, and is
// called for it at each launch of the graph.
#include "graphs.hpp"

#include "handles.hpp"
#include "profiling.hpp"

#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {
struct Capture {
  Stream origin;
  int mode;
  uint64_t first_work;
  bool is_invalid;
  std::set<Stream> forked;  // streams that take part and that no stream of the capture has waited for since
};
struct Graph {
  uint64_t number, nodes;
};
Handles graphs;  // and executable graphs
std::mutex graphs_mutex;
std::map<uint64_t, Capture> captures;
std::map<Stream, uint64_t> capturing;
uint64_t last_number = 0;
std::atomic<uint64_t> open_captures{0};
thread_local int capture_mode = 0;  // cudaStreamCaptureModeGlobal, ThreadLocal, Relaxed

// Called with the number of a graph; the first returns an error of the runtime.
std::atomic<int (*)(uint64_t)> on_launch{nullptr};
std::atomic<void (*)(uint64_t)> on_destroy{nullptr};
std::atomic<void (*)(uint64_t, const char*, void*, const void*, size_t)> on_work{nullptr};
std::map<uint64_t, int> owners;  // how many graphs and executable graphs have a number

uint64_t number_of(Stream stream) {
  auto found = capturing.find(stream);
  return found == capturing.end() ? 0 : found->second;
}
int invalidate(uint64_t number) {
  auto found = captures.find(number);
  if (found != captures.end()) found->second.is_invalid = true;
  return fail(kCaptureUnsupported);
}
Graph* new_graph(uint64_t number, uint64_t nodes) {
  std::lock_guard<std::mutex> guard(graphs_mutex);
  ++owners[number];
  return graphs.add(new Graph{number, nodes});
}
int destroy(Graph* graph) {
  if (!graphs.remove(graph)) return fail(kInvalidValue);
  bool is_last;
  {
    std::lock_guard<std::mutex> guard(graphs_mutex);
    is_last = !--owners[graph->number];
    if (is_last) owners.erase(graph->number);
  }
  if (auto forget = on_destroy.load(); forget && is_last) forget(graph->number);
  delete graph;
  return kSuccess;
}
}  // namespace

uint64_t capture_of(Stream stream) {
  if (!open_captures) return 0;
  std::lock_guard<std::mutex> guard(graphs_mutex);
  return number_of(stream);
}
void join_capture(Stream stream, uint64_t number, Stream joined) {
  if (!number || !open_captures) return;
  std::lock_guard<std::mutex> guard(graphs_mutex);
  auto found = captures.find(number);
  if (found == captures.end()) return;
  found->second.forked.erase(joined);
  if (capturing.insert({stream, number}).second) found->second.forked.insert(stream);
}
void forget_captures(Stream stream) {
  if (!open_captures) return;
  std::lock_guard<std::mutex> guard(graphs_mutex);
  uint64_t number = number_of(stream);
  capturing.erase(stream);
  auto found = captures.find(number);
  if (found == captures.end()) return;
  found->second.is_invalid = true;
  if (found->second.origin != stream) return;
  captures.erase(found);
  for (auto at = capturing.begin(); at != capturing.end();)
    at = at->second == number ? capturing.erase(at) : std::next(at);
  --open_captures;
}
int check_no_capture(Stream stream) {
  if (!open_captures) return kSuccess;
  std::lock_guard<std::mutex> guard(graphs_mutex);
  uint64_t number = number_of(stream);
  return number ? invalidate(number) : kSuccess;
}
int check_no_captures() {
  if (!open_captures) return kSuccess;
  std::lock_guard<std::mutex> guard(graphs_mutex);
  for (auto& [number, capture] : captures)
    if (capture.mode != 2 && capture_mode != 2 && !capture.is_invalid) return invalidate(number);
  return kSuccess;
}
bool record_work(Stream stream, const char* kernel, void* to, const void* from, size_t size) {
  uint64_t number = capture_of(stream);
  if (!number) return false;
  if (auto record = on_work.load()) record(number, kernel, to, from, size);
  return true;
}

API const std::atomic<uint64_t>* emulated_open_captures() { return &open_captures; }
API uint64_t emulated_capture_of(Stream stream) { return capture_of(stream); }
// What was asked for in a capture is refused: as on a card, the graph cannot be had any longer. The problem
// is named again where the capture is ended, because that error may be the last one that a user reads.
static thread_local std::string refused_in_capture;
API void emulated_invalidate_capture(Stream stream, const char* problem) {
  KeepLastError keep;
  if (!check_no_capture(stream)) return;
  refused_in_capture = std::string("operation failed due to a previous error during capture: ") + problem;
}
const char* invalid_capture_text() {
  if (refused_in_capture.empty()) return "operation failed due to a previous error during capture";
  return refused_in_capture.c_str();
}
API void emulated_on_graphs(int (*launch)(uint64_t), void (*destroyed)(uint64_t),
                            void (*work)(uint64_t, const char*, void*, const void*, size_t)) {
  on_launch = launch;
  on_destroy = destroyed;
  on_work = work;
}

// ---- Capture ----

API int cudaStreamBeginCapture(Stream stream, int mode) {
  std::lock_guard<std::mutex> guard(graphs_mutex);
  if ((uintptr_t)stream < 3 || number_of(stream)) return fail(kCaptureUnsupported);  // the legacy stream
  refused_in_capture.clear();
  captures[++last_number] = {stream, mode, work_counted(), false, {}};
  capturing[stream] = last_number;
  ++open_captures;
  return kSuccess;
}
API int cudaStreamEndCapture(Stream stream, Graph** graph) {
  uint64_t number, nodes;
  Capture ended;
  *graph = nullptr;
  {
    std::lock_guard<std::mutex> guard(graphs_mutex);
    number = number_of(stream);
    if (!number) return fail(kIllegalState);
    ended = captures[number];
    if (ended.origin != stream) return fail(kCaptureUnmatched);
    nodes = work_counted() - ended.first_work;
    captures.erase(number);
    for (auto at = capturing.begin(); at != capturing.end();)
      at = at->second == number ? capturing.erase(at) : std::next(at);
    --open_captures;
  }
  if (ended.is_invalid || !ended.forked.empty()) {
    if (auto forget = on_destroy.load()) forget(number);
    return fail(ended.is_invalid ? kCaptureInvalidated : kCaptureUnjoined);
  }
  return *graph = new_graph(number, nodes), kSuccess;
}
static int capture_info(Stream stream, int* status, unsigned long long* id) {
  uint64_t number = capture_of(stream);
  bool is_invalid = false;
  if (number) {
    std::lock_guard<std::mutex> guard(graphs_mutex);
    is_invalid = captures[number].is_invalid;
  }
  *status = number ? (is_invalid ? 2 : 1) : 0;
  if (id) *id = number;
  return kSuccess;
}
API int cudaStreamIsCapturing(Stream stream, int* status) { return capture_info(stream, status, nullptr); }
API int cuStreamIsCapturing(Stream stream, int* status) { return capture_info(stream, status, nullptr); }
// Further arguments ask for the graph and for what it depends on. torch only passes them to add nodes by
// hand, which is refused.
API int cudaStreamGetCaptureInfo(Stream stream, int* status, unsigned long long* id) {
  return capture_info(stream, status, id);
}
API int cudaStreamGetCaptureInfo_v2(Stream stream, int* status, unsigned long long* id) {
  return capture_info(stream, status, id);
}
API int cudaStreamGetCaptureInfo_v3(Stream stream, int* status, unsigned long long* id) {
  return capture_info(stream, status, id);
}
API int cudaThreadExchangeStreamCaptureMode(int* mode) { return std::swap(capture_mode, *mode), kSuccess; }

// ---- Graphs ----

static int instantiate(Graph** exec, const Graph* graph) {
  if (!graphs.has(graph)) return fail(kInvalidValue);
  return *exec = new_graph(graph->number, graph->nodes), kSuccess;
}
API int cudaGraphInstantiate(Graph** exec, const Graph* graph, unsigned long long) { return instantiate(exec, graph); }
API int cudaGraphInstantiateWithFlags(Graph** exec, const Graph* graph, unsigned long long) {
  return instantiate(exec, graph);
}
API int cudaGraphLaunch(const Graph* exec, Stream stream) {
  if (!graphs.has(exec)) return fail(kInvalidValue);
  ProfiledCallScope profiled(kCallGraphLaunch);
  if (int error = wait_for_stream(stream)) return error;
  if (int error = check_no_capture(stream)) return error;
  for (uint64_t i = 0; i < exec->nodes; ++i) count_work();
  profiled.kernel("a CUDA graph", stream);  // as one piece: which kernels it has is not kept
  auto launch = on_launch.load();
  return launch ? launch(exec->number) : kSuccess;
}
API int cudaGraphDestroy(Graph* graph) { return destroy(graph); }
API int cudaGraphExecDestroy(Graph* exec) { return destroy(exec); }
API int cudaGraphGetNodes(const Graph* graph, void**, size_t* count) {
  if (!graphs.has(graph)) return fail(kInvalidValue);
  return *count = graph->nodes, kSuccess;
}
// Which kernels a graph has is not kept: each node is a piece of work, in the order of the capture.
API int cudaGraphDebugDotPrint(const Graph* graph, const char* path, unsigned) {
  if (!graphs.has(graph) || !path) return fail(kInvalidValue);
  FILE* file = fopen(path, "w");
  if (!file) return fail(kOperatingSystem);
  auto number = (unsigned long long)graph->number;
  fprintf(file, "digraph dot {\nsubgraph cluster_%llu {\nlabel=\"graph_%llu, emulated\"\n", number, number);
  for (uint64_t i = 0; i < graph->nodes; ++i) {
    auto node = (unsigned long long)i;
    fprintf(file, "\"graph_%llu_node_%llu\" [label=\"%llu\"];\n", number, node, node);
    if (i) fprintf(file, "\"graph_%llu_node_%llu\" -> \"graph_%llu_node_%llu\";\n", number, node - 1, number, node);
  }
  fprintf(file, "}\n}\n");
  return fclose(file) ? fail(kOperatingSystem) : kSuccess;
}
NOTHING_TO_DO(cudaGraphRetainUserObject) NOTHING_TO_DO(cudaUserObjectRelease)
API int cudaUserObjectCreate(void** object, void*, void (*)(void*), unsigned, unsigned) {
  static int placeholder;
  return *object = &placeholder, kSuccess;
}
