// Streams and events. Work is done when it is given, but for collectives: what follows waits for those.
#include "graphs.hpp"
#include "handles.hpp"
#include "profiling.hpp"

#include <atomic>
#include <utility>

void forget_green_stream(Stream stream);  // contexts.cpp

static std::atomic<uint64_t> work{0};
void count_work() { ++work; }
uint64_t work_counted() { return work; }

struct StreamState {
  int priority, device;
  unsigned flags;
  uint64_t id;
};
static Handles streams, events;
static bool is_special(Stream stream) { return (uintptr_t)stream < 16; }  // the default streams are small numbers
static int create_stream(Stream* stream, int priority, unsigned flags) {
  make_driver_ready();
  static std::atomic<uint64_t> last_id{16};
  return *stream = streams.add(new StreamState{priority, current_device, flags, ++last_id}), kSuccess;
}
API int cudaStreamCreate(Stream* stream) { return create_stream(stream, 0, 0); }
API int cudaStreamCreateWithFlags(Stream* stream, unsigned flags) { return create_stream(stream, 0, flags); }
API int cudaStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
  return create_stream(stream, priority, flags);
}
API int cudaStreamGetFlags(Stream stream, unsigned* flags) {
  return *flags = is_special(stream) ? 0 : ((StreamState*)stream)->flags, kSuccess;
}
API int cudaStreamGetId(Stream stream, unsigned long long* id) {
  return *id = is_special(stream) ? (uintptr_t)stream : ((StreamState*)stream)->id, kSuccess;
}
API int cudaStreamGetDevice(Stream stream, int* device) {
  return *device = is_special(stream) ? current_device : ((StreamState*)stream)->device, kSuccess;
}
API int cudaStreamDestroy(Stream stream) {
  if (!streams.remove(stream)) return fail(kInvalidHandle);
  if (pending_jobs) forget_stream(stream);
  forget_captures(stream);
  if (events_are_late) forget_progress(stream);
  forget_green_stream(stream);
  return delete (StreamState*)stream, kSuccess;
}
// Some programs ask until the answer changes, so it does after so many questions, and the device then is there.
static constexpr int kMostQuestions = 4096;
API int cudaStreamQuery(Stream stream) {
  if (!are_done(jobs_of(stream))) return kNotReady;
  if (!events_are_late) return kSuccess;
  static std::atomic<int> asked{0};  // of any stream
  Place place = place_of(stream);
  if (!has_come_to(place) && ++asked % kMostQuestions) return kNotReady;
  return host_has_waited_for(place), kSuccess;
}
API int cudaStreamSynchronize(Stream stream) {
  ProfiledCallScope profiled(kCallStreamSynchronize);
  if (int error = check_no_capture(stream)) return error;
  int error = wait_for_stream(stream);
  if (events_are_late) host_has_waited_for(place_of(stream));
  return error;
}
API int cudaDeviceSynchronize() {
  make_driver_ready();
  ProfiledCallScope profiled(kCallDeviceSynchronize);
  if (int error = check_no_captures()) return error;
  return wait_for_device();
}
API int cudaStreamGetPriority(Stream stream, int* priority) {
  if (!is_special(stream) && !streams.has(stream)) return fail(kInvalidHandle);
  *priority = is_special(stream) ? 0 : ((StreamState*)stream)->priority;
  return kSuccess;
}
API int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return kSuccess;
}
API int cudaLaunchHostFunc(Stream stream, void (*function)(void*), void* data) {
  int error = wait_for_stream(stream);
  return function(data), error;
}
API int cudaStreamAddCallback(Stream stream, void (*function)(Stream, int, void*), void* data, unsigned) {
  int error = wait_for_stream(stream);
  return function(stream, error, data), kSuccess;
}

// ---- Events ----

// An event's time is the amount of work given before it. So times are the same in every run, and
// cuDNN's benchmark mode, which compares times, always takes the plan that cuDNN's heuristics put first.
static constexpr float kMillisecondsOfWork = 0.01f;
struct Event {
  bool recorded = false;
  uint64_t work = 0;
  uint64_t capture = 0;  // the graph in which it was recorded; 0 if in none
  Stream stream = nullptr;
  Place place{};  // if events are late
  mutable std::atomic<int> asked{0};
  std::shared_ptr<const Jobs> jobs;  // what was not done when it was recorded; other threads may read it
  Jobs pending() const {
    auto found = std::atomic_load(&jobs);
    return found ? *found : Jobs();
  }
};
static int create_event(Event** event) {
  make_driver_ready();
  return *event = events.add(new Event), kSuccess;
}
static int record_event(Event* event, Stream stream) {
  if (!events.has(event)) return fail(kInvalidHandle);
  event->recorded = true;
  event->work = work_counted();
  event->capture = capture_of(stream);
  event->stream = stream;
  event->asked = 0;
  if (events_are_late) event->place = place_of(stream);
  Jobs jobs = jobs_of(stream);
  std::shared_ptr<const Jobs> kept = jobs.empty() ? nullptr : std::make_shared<const Jobs>(std::move(jobs));
  return std::atomic_store(&event->jobs, kept), kSuccess;
}
API int cudaEventCreate(Event** event) { return create_event(event); }
API int cudaEventCreateWithFlags(Event** event, unsigned) { return create_event(event); }
API int cudaEventDestroy(Event* event) {
  if (!events.remove(event)) return fail(kInvalidHandle);
  return delete event, kSuccess;
}
API int cudaEventRecord(Event* event, Stream stream) { return record_event(event, stream); }
API int cudaEventRecordWithFlags(Event* event, Stream stream, unsigned) { return record_event(event, stream); }
API int cudaEventQuery(const Event* event) {
  if (!events.has(event)) return fail(kInvalidHandle);
  if (event->capture) return fail(kCaptureUnsupported);
  if (!are_done(event->pending())) return kNotReady;
  if (!events_are_late || !event->recorded || has_come_to(event->place)) return kSuccess;
  if (++event->asked < kMostQuestions) return kNotReady;
  return host_has_waited_for(event->place), kSuccess;
}
API int cudaEventSynchronize(const Event* event) {
  if (!events.has(event)) return fail(kInvalidHandle);
  if (events_are_late && event->recorded) host_has_waited_for(event->place);
  return wait_for(event->pending());
}
API int cudaStreamWaitEvent(Stream stream, const Event* event) {
  if (!events.has(event)) return fail(kInvalidHandle);
  join_capture(stream, event->capture, event->stream);
  if (events_are_late && event->recorded) let_wait(stream, event->place);
  return give(stream, event->pending()), kSuccess;
}
API int cudaEventElapsedTime(float* milliseconds, const Event* start, const Event* end) {
  if (!events.has(start) || !events.has(end) || !start->recorded || !end->recorded) return fail(kInvalidHandle);
  *milliseconds = (float)((int64_t)(end->work - start->work)) * kMillisecondsOfWork;
  return kSuccess;
}
