// The driver's contexts: the primary one of each device, further ones, and green contexts, which have a part
// of a card's multiprocessors. Nothing is executed, so only the numbers of a green context differ.
#include "pending.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

namespace {
struct Context {
  int device;
  unsigned flags, multiprocessors;  // 0 multiprocessors: all of the card
  uint64_t id;
  bool is_green;
};
std::mutex contexts_mutex;
std::set<Context*> created;
std::map<Stream, Context*> green_streams;
Context primaries[kMostDevices];
uint64_t last_id = kMostDevices;

// What this thread has pushed, and the device that was current before.
struct Pushed {
  Context* context;
  int device_before;
};
thread_local std::vector<Pushed> stack;

Context* primary(int device) {
  primaries[device].device = device;
  primaries[device].id = (uint64_t)device + 1;
  return &primaries[device];
}
bool is_context(Context* context) {
  if (context >= primaries && context < primaries + kMostDevices) return is_device((int)(context - primaries));
  std::lock_guard<std::mutex> guard(contexts_mutex);
  return created.count(context);
}
// The runtime may have chosen another device since a context was pushed.
Context* current() {
  bool is_pushed = !stack.empty() && stack.back().context->device == current_device;
  return is_pushed ? stack.back().context : primary(current_device);
}
void push(Context* context) {
  stack.push_back({context, current_device});
  current_device = context->device;
}
void pop() {
  if (stack.empty()) return;
  current_device = stack.back().device_before;
  stack.pop_back();
}
// `stack` of other threads is not searched: as on a card, the context must not be current there.
int destroy(Context* context) {
  if (!context->is_green) {
    std::lock_guard<std::mutex> guard(memory_mutex);
    give_bytes(context->device, settings.context_bytes);
  }
  if (!stack.empty() && stack.back().context == context) pop();
  stack.erase(std::remove_if(stack.begin(), stack.end(), [&](Pushed& p) { return p.context == context; }), stack.end());
  std::lock_guard<std::mutex> guard(contexts_mutex);
  for (auto at = green_streams.begin(); at != green_streams.end();)
    at = at->second == context ? green_streams.erase(at) : std::next(at);
  created.erase(context);
  delete context;
  return kSuccess;
}
Context* create(int device, unsigned flags, unsigned multiprocessors, bool is_green) {
  std::lock_guard<std::mutex> guard(contexts_mutex);
  auto context = new Context{device, flags, multiprocessors, ++last_id, is_green};
  created.insert(context);
  return context;
}
int create_and_push(void** out, unsigned flags, int device) {
  if (int error = check_device(device)) return error;
  {
    std::lock_guard<std::mutex> guard(memory_mutex);
    if (!take_bytes(device, settings.context_bytes)) return kOutOfMemory;
  }
  auto context = create(device, flags, 0, false);
  push(context);
  return *out = context, kSuccess;
}
}  // namespace

void* current_context() { return current(); }

// ---- Primary contexts ----

API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  // torch switches to a device for the length of an operation only if it has a context there
  if (!is_device(device)) return kInvalidDevice;
  std::lock_guard<std::mutex> guard(memory_mutex);
  *flags = primaries[device].flags;
  *active = device == 0 || bytes_in_use(device) > (size_t)settings.context_bytes;
  return kSuccess;
}
API int cuDevicePrimaryCtxRetain(void** out, int device) {
  if (int error = check_device(device)) return error;
  return *out = primary(device), kSuccess;
}
API int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
  if (!is_device(device)) return kInvalidDevice;
  return primaries[device].flags = flags, kSuccess;
}
API int cuDevicePrimaryCtxRelease_v2(int device) { return is_device(device) ? kSuccess : kInvalidDevice; }

// ---- The current context ----

API int cuCtxGetCurrent(void** out) { return driver_is_ready ? (*out = current(), kSuccess) : kNotInitialized; }
API int cuCtxGetDevice(int* device) {
  return driver_is_ready ? (*device = current_device, kSuccess) : kNotInitialized;
}
API int cuCtxGetDevice_v2(int* device, Context* context) {
  if (!context) return cuCtxGetDevice(device);
  if (!is_context(context)) return kInvalidContext;
  return *device = context->device, kSuccess;
}
API int cuCtxPushCurrent_v2(Context* context) {
  if (!is_context(context)) return kInvalidContext;
  return push(context), kSuccess;
}
API int cuCtxPopCurrent_v2(void** out) {
  if (out) *out = current();
  return pop(), kSuccess;
}
API int cuCtxSetCurrent(Context* context) {  // replaces the last one that was pushed
  if (!context) return pop(), kSuccess;
  if (!is_context(context)) return kInvalidContext;
  if (context == primary(context->device) && stack.empty()) return current_device = context->device, kSuccess;
  if (stack.empty()) return push(context), kSuccess;
  stack.back().context = context;
  return current_device = context->device, kSuccess;
}
API int cuCtxPushCurrent(Context* context) { return cuCtxPushCurrent_v2(context); }
API int cuCtxPopCurrent(void** out) { return cuCtxPopCurrent_v2(out); }
API int cuCtxGetId(Context* context, uint64_t* id) {
  if (!context) context = current();
  if (!is_context(context)) return kInvalidContext;
  return *id = context->id, kSuccess;
}
API int cuCtxGetFlags(unsigned* flags) { return *flags = current()->flags, kSuccess; }
API int cuCtxSetFlags(unsigned flags) { return current()->flags = flags, kSuccess; }
API int cuCtxGetApiVersion(Context* context, unsigned* version) {
  if (context && !is_context(context)) return kInvalidContext;
  return *version = (unsigned)settings.cuda_version, kSuccess;
}
API int cuCtxSynchronize() {
  KeepLastError keep;
  return wait_for_device();
}
API int cuCtxSynchronize_v2(Context* context) {
  return context && !is_context(context) ? kInvalidContext : cuCtxSynchronize();
}
static size_t limits[16] = {1024, kMiB, 8 * kMiB, 2, 2048, 128};  // CUlimit
API int cuCtxGetLimit(size_t* value, unsigned which) {
  return which < 16 ? (*value = limits[which], kSuccess) : kInvalidValue;
}
API int cuCtxSetLimit(unsigned which, size_t value) { return which < 16 ? (limits[which] = value, kSuccess) : kInvalidValue; }
API int cuCtxGetCacheConfig(int* value) { return *value = 0, kSuccess; }
API int cuCtxGetSharedMemConfig(int* value) { return *value = 1, kSuccess; }  // banks of four bytes
NOTHING_TO_DO(cuCtxSetCacheConfig) NOTHING_TO_DO(cuCtxSetSharedMemConfig) NOTHING_TO_DO(cuCtxResetPersistingL2Cache)
NOTHING_TO_DO(cuCtxEnablePeerAccess) NOTHING_TO_DO(cuCtxDisablePeerAccess)

// ---- Further contexts, which take memory as the primary one does ----

API int cuCtxCreate_v2(void** out, unsigned flags, int device) { return create_and_push(out, flags, device); }
API int cuCtxCreate_v3(void** out, void*, int, unsigned flags, int device) { return create_and_push(out, flags, device); }
API int cuCtxCreate_v4(void** out, void*, unsigned flags, int device) { return create_and_push(out, flags, device); }
API int cuCtxDestroy_v2(Context* context) {
  std::unique_lock<std::mutex> guard(contexts_mutex);
  if (!created.count(context)) return kInvalidContext;
  guard.unlock();
  return destroy(context);
}

// ---- Green contexts ----

// CUdevResource: a part of a card, here of its multiprocessors.
struct Resource {
  int type;
  unsigned char padding[92];
  unsigned count, smallest, alignment, flags;
  unsigned char rest[32];
};
constexpr int kMultiprocessors = 1;
// The fewest multiprocessors of a partition, and the number of which they are a multiple: the documentation of
// cuDevSmResourceSplitByCount gives both by compute capability.
static unsigned smallest_part() { return settings.major >= 9 ? 8 : settings.major == 8 ? 4 : 2; }
static unsigned step_of_parts() { return settings.major >= 9 ? 8 : 2; }
static void describe(Resource* out, unsigned count) {
  out->type = kMultiprocessors;
  memset(out->padding, 0, sizeof out->padding);
  out->count = count;
  out->smallest = smallest_part();
  out->alignment = step_of_parts();
  out->flags = 0;
}
static int resource_of(Context* context, Resource* out, int type, const char* function) {
  if (type != kMultiprocessors) return refuse_of_driver(function);
  unsigned own = context->multiprocessors;
  return describe(out, own ? own : (unsigned)settings.multiprocessors), kSuccess;
}
API int cuDeviceGetDevResource(int device, Resource* out, int type) {
  if (!is_device(device)) return kInvalidDevice;
  return resource_of(primary(device), out, type, "DevResource of this type (cuDeviceGetDevResource)");
}
API int cuCtxGetDevResource(Context* context, Resource* out, int type) {
  if (!is_context(context)) return kInvalidContext;
  return resource_of(context, out, type, "cuCtxGetDevResource");
}
API int cuGreenCtxGetDevResource(Context* context, Resource* out, int type) {
  return cuCtxGetDevResource(context, out, type);
}
API int cuDevSmResourceSplitByCount(Resource* parts, unsigned* count, const Resource* whole, Resource* remaining,
                                    unsigned, unsigned least) {
  if (!count || !whole || whole->type != kMultiprocessors) return kInvalidValue;
  unsigned size = (unsigned)round_up(std::max(least, smallest_part()), step_of_parts());
  if (size > whole->count) return kInvalidResourceConfiguration;
  unsigned possible = whole->count / size, wanted = parts ? std::min(*count, possible) : possible;
  for (unsigned i = 0; parts && i < wanted; ++i) describe(&parts[i], size);
  if (remaining) {
    describe(remaining, whole->count - wanted * size);
    if (!remaining->count) remaining->type = 0;
  }
  return *count = wanted, kSuccess;
}
API int cuDevResourceGenerateDesc(void** out, const Resource* resources, unsigned count) {
  unsigned multiprocessors = 0;
  for (unsigned i = 0; i < count; ++i) {
    if (resources[i].type != kMultiprocessors) return refuse_of_driver("cuDevResourceGenerateDesc");
    multiprocessors += resources[i].count;
  }
  if (!multiprocessors) return kInvalidValue;
  return *out = (void*)(uintptr_t)multiprocessors, kSuccess;  // all that a descriptor has to say
}
API int cuGreenCtxCreate(void** out, void* descriptor, int device, unsigned flags) {
  if (!is_device(device)) return kInvalidDevice;
  auto multiprocessors = (unsigned)(uintptr_t)descriptor;
  if (!multiprocessors || multiprocessors > settings.multiprocessors) return kInvalidValue;
  return *out = create(device, flags, multiprocessors, true), kSuccess;
}
API int cuGreenCtxDestroy(Context* context) { return is_context(context) ? destroy(context) : kInvalidContext; }
API int cuCtxFromGreenCtx(void** out, Context* context) {
  return is_context(context) ? (*out = context, kSuccess) : kInvalidContext;
}
API int cuGreenCtxGetId(Context* context, uint64_t* id) { return cuCtxGetId(context, id); }
extern "C" int cudaStreamCreateWithPriority(Stream* stream, unsigned flags, int priority);
API int cuGreenCtxStreamCreate(Stream* stream, Context* context, unsigned flags, int priority) {
  if (!is_context(context)) return kInvalidContext;
  cudaStreamCreateWithPriority(stream, flags, priority);
  std::lock_guard<std::mutex> guard(contexts_mutex);
  return green_streams[*stream] = context, kSuccess;
}
void forget_green_stream(Stream stream) {
  std::lock_guard<std::mutex> guard(contexts_mutex);
  green_streams.erase(stream);
}
static Context* green_context_of(Stream stream) {
  std::lock_guard<std::mutex> guard(contexts_mutex);
  auto found = green_streams.find(stream);
  return found == green_streams.end() ? nullptr : found->second;
}
API int cuStreamGetGreenCtx(Stream stream, void** out) { return *out = green_context_of(stream), kSuccess; }
API int cuStreamGetCtx(Stream stream, void** out) {
  Context* green = green_context_of(stream);
  return *out = green ? green : current(), kSuccess;
}
API int cuStreamGetCtx_v2(Stream stream, void** out, void** green) {
  Context* found = green_context_of(stream);
  if (green) *green = found;
  if (out) *out = found ? nullptr : current();
  return kSuccess;
}
API int cuStreamGetDevResource(Stream stream, Resource* out, int type) {
  Context* green = green_context_of(stream);
  return resource_of(green ? green : current(), out, type, "cuStreamGetDevResource");
}
