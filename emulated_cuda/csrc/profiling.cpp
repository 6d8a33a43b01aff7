// CUPTI, as torch's profiler (Kineto) asks it. Records have CUPTI's layout, which is the same for the fields
// that are filled here in CUDA 12 and 13; sizes are those of CUDA 13, because only this library steps over them.
#include "profiling.hpp"

#include <pthread.h>
#include <unistd.h>

#include <cstring>
#include <ctime>
#include <string>
#include <utility>

#include "graphs.hpp"

std::atomic<unsigned> profiled_kinds{0};
extern "C" int cudaStreamGetId(Stream stream, unsigned long long* id);

namespace {
enum Kind : int { kCopies = 1, kFills = 2, kDriverCalls = 4, kRuntimeCalls = 5, kKernels = 10, kExternal = 39 };
bool is_wanted(Kind kind) {
  unsigned bit = kind == kExternal ? 31 : (unsigned)kind;
  return profiled_kinds >> bit & 1;
}

// ---- CUPTI's records ----

#pragma pack(push, 1)
struct Kernel {
  int kind;
  unsigned char cache[2];
  uint16_t registers;
  unsigned char unused1[8];
  uint64_t start, end, completed;
  unsigned device, context, stream;
  int grid[3], block[3];
  int static_shared, dynamic_shared;
  unsigned unused2[2], correlation;
  int64_t grid_id;
  const char* name;
  unsigned char unused3[104];
};
struct Copy {
  int kind;
  unsigned char direction, from, to, flags;
  uint64_t bytes, start, end;
  unsigned device, context, stream, correlation;
  unsigned char unused[48];
};
struct Fill {
  int kind;
  unsigned value;
  uint64_t bytes, start, end;
  unsigned device, context, stream, correlation;
  uint16_t flags, memory;
  unsigned char unused[36];
};
struct Call {
  int kind;
  unsigned call;
  uint64_t start, end;
  unsigned process, thread, correlation, result;
};
struct External {
  int kind, external_kind;
  uint64_t id;
  unsigned correlation, unused;
};
#pragma pack(pop)
static_assert(sizeof(Kernel) == 216 && offsetof(Kernel, name) == 104 && offsetof(Kernel, correlation) == 92, "CUPTI");
static_assert(sizeof(Copy) == 96 && sizeof(Fill) == 88 && sizeof(Call) == 40 && sizeof(External) == 24, "CUPTI");

std::mutex records_mutex;
std::string records;          // those that were not fetched, one after the other
thread_local std::string own; // those of the call that this thread is in, whose end is not known
std::atomic<unsigned> last_correlation{0};

using Request = void (*)(uint8_t** buffer, size_t* size, size_t* most_records);
using Complete = void (*)(void* context, unsigned stream, uint8_t* buffer, size_t size, size_t valid);
std::atomic<Request> request_buffer{nullptr};
std::atomic<Complete> complete_buffer{nullptr};
struct Buffer {
  uint8_t* start;
  size_t size;
};
Buffer buffer{};  // of the profiler, for records; hold the mutex
void open_buffer() {
  size_t most_records = 0;
  if (Request request = request_buffer) request(&buffer.start, &buffer.size, &most_records);
}
// Numbers by which the profiler knows the operators of this thread that run.
thread_local std::vector<std::pair<int, uint64_t>> externals;
std::atomic<uint64_t (*)()> clock_of_profiler{nullptr};

uint64_t now() {
  if (auto clock = clock_of_profiler.load()) return clock();
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}
template <class Record>
void add(const Record& record) {
  own.append((const char*)&record, sizeof record);
}
size_t size_of(int kind) {
  switch (kind) {
    case kCopies: return sizeof(Copy);
    case kFills: return sizeof(Fill);
    case kKernels: return sizeof(Kernel);
    case kExternal: return sizeof(External);
    default: return sizeof(Call);
  }
}
unsigned number_of(Stream stream) {
  constexpr unsigned kDefaultStream = 7;  // as CUPTI numbers it
  unsigned long long id;
  cudaStreamGetId(stream, &id);
  return id < 16 ? kDefaultStream : (unsigned)id;
}
enum Memory : unsigned char { kPageable = 1, kPinned = 2, kDevice = 3 };
Memory memory_of(const void* pointer) {
  return is_on_device(pointer) ? kDevice : is_pinned(pointer) ? kPinned : kPageable;
}
unsigned char direction(Memory from, Memory to) {  // CUpti_ActivityMemcpyKind
  if (from == kDevice) return to == kDevice ? 8 : 2;
  return to == kDevice ? 1 : 9;
}
}  // namespace

void ProfiledCallScope::begin(ProfiledCall call) {
  is_on_ = true;
  call_ = call;
  correlation_ = ++last_correlation;
  start_ = now();
  own.clear();
}
void ProfiledCallScope::add_kernel(const char* name, Stream stream, Dim3 grid, Dim3 block, size_t shared) {
  if (!is_wanted(kKernels) || capture_of(stream)) return;
  Kernel record{};
  record.kind = kKernels;
  record.registers = 32;  // as cudaFuncGetAttributes says of each kernel
  record.start = start_;
  record.device = (unsigned)current_device;
  record.context = record.device + 1;
  record.stream = number_of(stream);
  const unsigned sizes[] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
  memcpy(record.grid, sizes, sizeof record.grid);
  memcpy(record.block, sizes + 3, sizeof record.block);
  record.dynamic_shared = (int)shared;
  record.correlation = correlation_;
  record.grid_id = correlation_;
  record.name = name;
  add(record);
}
void ProfiledCallScope::add_copy(const void* to, const void* from, size_t size, Stream stream) {
  if (!is_wanted(kCopies) || capture_of(stream)) return;
  Memory source = memory_of(from), target = memory_of(to);
  if (source != kDevice && target != kDevice) return;
  auto device = (unsigned)current_device;
  add(Copy{kCopies, direction(source, target), source, target, 0, size, start_, 0, device, device + 1,
           number_of(stream), correlation_, {}});
}
void ProfiledCallScope::add_fill(const void* start, unsigned value, size_t size, Stream stream) {
  if (!is_wanted(kFills) || capture_of(stream)) return;
  auto device = (unsigned)current_device;
  add(Fill{kFills, value, size, start_, 0, device, device + 1, number_of(stream), correlation_, 0, memory_of(start), {}});
}
void ProfiledCallScope::end() {
  uint64_t ended = now();
  for (size_t at = 0; at < own.size(); at += size_of(*(int*)&own[at])) {
    char* record = &own[at];
    size_t place = *(int*)record == kKernels ? offsetof(Kernel, end) : offsetof(Copy, end);
    static_assert(offsetof(Copy, end) == offsetof(Fill, end) && offsetof(Copy, end) == offsetof(Kernel, end), "");
    memcpy(record + place, &ended, sizeof ended);
  }
  // Kineto reads records once, in order: what links them comes before what is linked.
  std::string done;
  own.swap(done);
  if (is_wanted(kExternal))
    for (auto& [kind, id] : externals) add(External{kExternal, kind, id, correlation_, 0});
  Kind kind = call_ & kOfDriver ? kDriverCalls : kRuntimeCalls;
  if (is_wanted(kind))
    add(Call{kind, call_ & ~kOfDriver, start_, ended, (unsigned)getpid(), (unsigned)(uintptr_t)pthread_self(),
             correlation_, 0});
  own += done;
  std::lock_guard<std::mutex> guard(records_mutex);
  records += own;
  // Kineto fetches records only if it was asked for a buffer while it traced.
  if (!own.empty() && !buffer.start) open_buffer();
}

// ---- CUPTI's functions ----

namespace {
enum : int { kCuptiInvalid = 1, kCuptiNoMore = 12, kCuptiEmpty = 18 };
int switch_kind(int kind, bool on) {
  unsigned bit = kind == kExternal ? 31 : (unsigned)kind;
  bool is_emulated = kind == kCopies || kind == kFills || kind == kKernels || kind == kExternal ||
                     kind == kRuntimeCalls || kind == kDriverCalls;
  if (!is_emulated) return kSuccess;  // there are none
  if (on) profiled_kinds |= 1u << bit;
  else profiled_kinds &= ~(1u << bit);
  return kSuccess;
}
}  // namespace

API int cuptiGetVersion(unsigned* version) {
  return *version = settings.cuda_version >= 13000 ? 130000 : 26, kSuccess;
}
API int cuptiSubscribe(void** subscriber, void*, void*) {
  static int placeholder;
  return *subscriber = &placeholder, kSuccess;
}
API int cuptiActivityRegisterCallbacks(Request request, Complete complete) {
  request_buffer = request;
  complete_buffer = complete;
  return kSuccess;
}
API int cuptiActivityRegisterTimestampCallback(uint64_t (*clock)()) { return clock_of_profiler = clock, kSuccess; }
API int cuptiActivityEnable(int kind) { return switch_kind(kind, true); }
API int cuptiActivityDisable(int kind) { return switch_kind(kind, false); }
API int cuptiActivityPushExternalCorrelationId(int kind, uint64_t id) {
  return externals.emplace_back(kind, id), kSuccess;
}
API int cuptiActivityPopExternalCorrelationId(int kind, uint64_t* id) {
  for (auto at = externals.rbegin(); at != externals.rend(); ++at)
    if (at->first == kind) {
      if (id) *id = at->second;
      externals.erase(std::next(at).base());
      return kSuccess;
    }
  return kCuptiEmpty;
}
API int cuptiActivityFlushAll(unsigned) {
  Complete complete = complete_buffer;
  if (!complete) return kSuccess;
  std::lock_guard<std::mutex> guard(records_mutex);
  size_t at = 0;
  while (at < records.size() || buffer.start) {
    if (!buffer.start) open_buffer();
    Buffer filled = std::exchange(buffer, Buffer{});
    if (!filled.start) break;  // the profiler wants no more
    size_t used = 0;
    for (size_t step; at < records.size(); used += step, at += step) {
      step = size_of(*(int*)&records[at]);
      if (used + step > filled.size) break;
      memcpy(filled.start + used, &records[at], step);
    }
    complete(nullptr, 0, filled.start, filled.size, used);
    if (!used) break;
  }
  return records.clear(), kSuccess;
}
API int cuptiActivityGetNextRecord(char* buffer, size_t valid, char** record) {
  char* next = *record ? *record + size_of(*(int*)*record) : buffer;
  if (next >= buffer + valid) return kCuptiNoMore;
  return *record = next, kSuccess;
}
API int cuptiActivityGetNumDroppedRecords(void*, unsigned, size_t* dropped) { return *dropped = 0, kSuccess; }
API int cuptiGetCallbackName(int, unsigned call, const char** name) {
  switch (call) {
    case kCallLaunch: return *name = "cudaLaunchKernel", kSuccess;
    case kCallCopy: return *name = "cudaMemcpyAsync", kSuccess;
    case kCallFill: return *name = "cudaMemsetAsync", kSuccess;
    case kCallGraphLaunch: return *name = "cudaGraphLaunch", kSuccess;
    case kCallStreamSynchronize: return *name = "cudaStreamSynchronize", kSuccess;
    case kCallDeviceSynchronize: return *name = "cudaDeviceSynchronize", kSuccess;
    case kCallDriverLaunch & ~kOfDriver: return *name = "cuLaunchKernel", kSuccess;
    default: return kCuptiInvalid;
  }
}
API int cuptiGetResultString(int error, const char** out) {
  return *out = error ? "an error that the emulated device does not return" : "success", kSuccess;
}
NOTHING_TO_DO(cuptiActivityEnableCudaEventDeviceTimestamps) NOTHING_TO_DO(cuptiActivityEnableDriverApi)
NOTHING_TO_DO(cuptiActivityEnableRuntimeApi) NOTHING_TO_DO(cuptiActivitySetAttribute)
NOTHING_TO_DO(cuptiEnableCallback) NOTHING_TO_DO(cuptiEnableDomain) NOTHING_TO_DO(cuptiFinalize)
NOTHING_TO_DO(cuptiUnsubscribe)
