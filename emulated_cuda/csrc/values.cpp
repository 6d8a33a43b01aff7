// The functions that emulated_cuda/values calls to compute values.
//
// It runs torch's own CUDA operator, which allocates, and then computes the result on the CPU. The
// CUDA operator must not change device memory, because its inputs are read afterwards, and those of an
// operator that works in place are its results.
#include "emulated.hpp"

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>

std::atomic<int> values_are_computed{0};
static thread_local Phase current_phase = kNoOperator;
static thread_local std::deque<int64_t> answers;

Phase phase() { return current_phase; }

API void emulated_compute_values(int on) { values_are_computed = on; }
// Whether this thread runs an operator in whose place Python was called, so that it holds Python's lock.
// The native counter asks for it by this name.
API int emulated_runs_operator() { return current_phase != kNoOperator; }
API int emulated_set_phase(int wanted) {
  int before = current_phase;
  current_phase = (Phase)wanted;
  return before;
}

// ---- Sizes that depend on values: the operator reads them back, and Python knows them ----

API void emulated_announce(int64_t value) { answers.push_back(value); }
API void emulated_forget_answers() { answers.clear(); }
bool answer(void* to, size_t size) {
  if (answers.empty() || size > sizeof(int64_t)) return false;
  int64_t next = answers.front();
  answers.pop_front();
  memcpy(to, &next, size);  // little-endian
  return true;
}

// ---- Work outside operators ----

static std::mutex name_mutex;
static char last_name[512];
static std::atomic<uint64_t> unknown_work{0};

void note_work(const char* name) {
  if (!values_are_computed || current_phase != kNoOperator) return;
  if (strstr(name, "spin_kernel")) return;  // torch.cuda._sleep: writes nothing
  std::lock_guard<std::mutex> guard(name_mutex);
  int status = 0;
  char* readable = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  snprintf(last_name, sizeof last_name, "%s", status ? name : readable);
  free(readable);
  ++unknown_work;
}
uint64_t unknown_work_counted() { return unknown_work; }
API void emulated_note_work(const char* name) { note_work(name); }
API const std::atomic<uint64_t>* emulated_unknown_work() { return &unknown_work; }
API void emulated_unknown_name(char* out, size_t size) {
  std::lock_guard<std::mutex> guard(name_mutex);
  snprintf(out, size, "%s", last_name);
}
