// Kernels: they are registered and launched, and do nothing. A launch that a card would refuse fails.
#include "launches.hpp"

#include "graphs.hpp"
#include "nccl/nan_check.hpp"
#include "profiling.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <unordered_map>
#include <utility>

extern std::atomic<uint64_t> launches;

int check_launch(Dim3 grid, Dim3 block, size_t shared, Stream stream) {
  if (int error = wait_for_stream(stream)) return error;
  ++launches;
  count_work();
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  bool is_valid = grid.x && grid.y && grid.z && grid.x <= 2147483647u && grid.y <= 65535 &&
                  grid.z <= 65535 && threads && threads <= 1024 && block.z <= 64 &&
                  shared <= (size_t)settings.shared_per_block_opt_in;
  return is_valid ? kSuccess : fail(kInvalidConfiguration);
}
static const char* kernel_name(const void* function);
static int launch(const void* function, Dim3 grid, Dim3 block, void** arguments, size_t shared, Stream stream) {
  const char* profiled_name = profiled_kinds ? kernel_name(function) : nullptr;
  ProfiledCallScope profiled(kCallLaunch);
  if (int error = check_launch(grid, block, shared, stream)) return error;
  if (profiled_name) profiled.kernel(profiled_name, stream, grid, block, shared);
  if (is_nan_check(function)) return check_for_nan(function, arguments);
  if (values_are_computed && phase() == kNoOperator && !record_work(stream, kernel_name(function), nullptr, nullptr, 0))
    note_work(kernel_name(function));
  return kSuccess;
}

// ---- Registration, called by torch's libraries when they are loaded ----

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}

// Of each kernel: the function by which the host launches it, and its name.
static std::vector<std::pair<const void*, const char*>>& kernels() {
  static std::vector<std::pair<const void*, const char*>> registered;
  return registered;
}
static std::mutex kernels_mutex;
API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  remember_nan_check(function, name);
  std::lock_guard<std::mutex> guard(kernels_mutex);
  kernels().push_back({function, name});
}
static const char* kernel_name(const void* function) {
  std::lock_guard<std::mutex> guard(kernels_mutex);
  static std::unordered_map<const void*, const char*> names;  // made when a name is asked for, which is rare
  static size_t named = 0;
  for (; named < kernels().size(); ++named) names.insert(kernels()[named]);
  auto found = names.find(function);
  return found == names.end() ? "a kernel whose name is not known" : found->second;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }

// ---- The runtime's launches ----

struct Configuration {
  Dim3 grid, block;
  size_t shared;
  Stream stream;
};
static thread_local Configuration configuration;  // of the launch that comes next in this thread
API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, Stream stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
API int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, Stream* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *stream = configuration.stream;
  return kSuccess;
}
API int __cudaGetKernel(const void** kernel, const void* function) { return *kernel = function, kSuccess; }
API int __cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** arguments, size_t shared, Stream stream) {
  return launch(function, grid, block, arguments, shared, stream);
}
API int cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** arguments, size_t shared, Stream stream) {
  return launch(function, grid, block, arguments, shared, stream);
}
API int cudaLaunchCooperativeKernel(const void* function, Dim3 grid, Dim3 block, void** arguments, size_t shared, Stream stream) {
  return launch(function, grid, block, arguments, shared, stream);
}
struct LaunchConfiguration {
  Dim3 grid, block;
  size_t shared;
  Stream stream;
};
API int cudaLaunchKernelExC(const LaunchConfiguration* wanted, const void* function, void** arguments) {
  return launch(function, wanted->grid, wanted->block, arguments, wanted->shared, wanted->stream);
}

// ---- Attributes of kernels: those of a small one ----

struct FunctionAttributes {
  size_t shared, constant, local;
  int threads_per_block, registers, ptx_version, binary_version, cache_mode, dynamic_shared, carveout;
};
constexpr size_t kFunctionAttributesSize = 144;
API int cudaFuncGetAttributes(void* out, const void*) {
  int version = (int)(settings.major * 10 + settings.minor);
  FunctionAttributes found = {0, 0, 0, 1024, 32, version, version, 0, (int)settings.shared_per_block, -1};
  memset(out, 0, kFunctionAttributesSize);
  memcpy(out, &found, sizeof found);
  return kSuccess;
}
constexpr int kDynamicShared = 8;
int set_kernel_attribute(int which, int value) {
  return which == kDynamicShared && value > settings.shared_per_block_opt_in ? fail(kInvalidValue) : kSuccess;
}
API int cudaFuncSetAttribute(const void*, int which, int value) { return set_kernel_attribute(which, value); }
static int occupancy(int* blocks, int threads, size_t shared) {
  if (threads <= 0) return fail(kInvalidValue);
  int64_t whole_warps = round_up(threads, 32);
  int64_t most = std::min(settings.threads_per_multiprocessor / whole_warps, settings.blocks_per_multiprocessor);
  if (shared) most = std::min(most, settings.shared_per_multiprocessor / (int64_t)(shared + kKiB));
  *blocks = (int)most;
  return kSuccess;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t shared) {
  return occupancy(blocks, threads, shared);
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t shared,
                                                               unsigned) {
  return occupancy(blocks, threads, shared);
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t shared) {
  return occupancy(blocks, threads, shared);
}
API int cuOccupancyMaxActiveClusters(int* clusters, const void*, const void*) {
  return *clusters = (int)settings.multiprocessors / 2, kSuccess;
}

// ---- Compilation at run time (NVRTC): nothing is compiled ----

API int nvrtcVersion(int* major, int* minor) {
  *major = (int)settings.cuda_version / 1000;
  *minor = (int)settings.cuda_version % 1000 / 10;
  return kSuccess;
}
static int placeholder[16];  // every program
API int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
  return *program = placeholder, kSuccess;
}
API int nvrtcDestroyProgram(void** program) { return *program = nullptr, kSuccess; }
NOTHING_TO_DO(nvrtcCompileProgram) NOTHING_TO_DO(nvrtcAddNameExpression)
API int nvrtcGetLoweredName(void*, const char* name, const char** lowered) { return *lowered = name, kSuccess; }
constexpr size_t kProgramSize = 8;
static int program_size(size_t* size) { return *size = kProgramSize, kSuccess; }
static int program(char* bytes) { return memset(bytes, 0, kProgramSize), kSuccess; }
API int nvrtcGetPTXSize(void*, size_t* size) { return program_size(size); }
API int nvrtcGetPTX(void*, char* bytes) { return program(bytes); }
API int nvrtcGetCUBINSize(void*, size_t* size) { return program_size(size); }
API int nvrtcGetCUBIN(void*, char* bytes) { return program(bytes); }
API int nvrtcGetProgramLogSize(void*, size_t* size) { return *size = 1, kSuccess; }
API int nvrtcGetProgramLog(void*, char* text) { return *text = 0, kSuccess; }
API const char* nvrtcGetErrorString(int) { return "an error that the emulated compiler does not return"; }
