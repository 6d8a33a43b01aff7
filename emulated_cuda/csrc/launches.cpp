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

// Kernels are compiled for some architectures, and a card runs what was compiled for the highest that
// is not above its own: on one of compute capability 8.9 kernels say that they are of 8.6, if there are
// none of 8.9. CUB chooses by that how to launch, and refuses what it was not compiled for.
struct FatBinary {
  int magic, version;
  const char* data;
};
struct FatBinaryData {
  uint32_t magic;
  uint16_t version, header_size;
  uint64_t size;
};
struct Compiled {
  uint16_t kind, version;
  uint32_t header_size;
  uint64_t size;
  uint32_t of_compression[2];
  uint16_t minor, major;
  uint32_t architecture;  // 86
};
constexpr uint32_t kFatBinary = 0x466243b1, kFatBinaryData = 0xba55ed50;
constexpr uint16_t kPtx = 1, kBinary = 2;

static int card_version() { return (int)(settings.major * 10 + settings.minor); }

// Which of the architectures of a fat binary this card runs, or its own if the binary is of another form.
static int version_that_runs(const FatBinary* binary) {
  if (!binary || (uint32_t)binary->magic != kFatBinary || !binary->data) return card_version();
  FatBinaryData header;
  memcpy(&header, binary->data, sizeof header);
  if (header.magic != kFatBinaryData) return card_version();
  const char* entry = binary->data + header.header_size;
  const char* end = entry + header.size;
  int compiled = 0, source = 0;
  while (entry + sizeof(Compiled) <= end) {
    Compiled found;
    memcpy(&found, entry, sizeof found);
    int version = (int)found.architecture;
    bool runs = version <= card_version() && version / 10 == card_version() / 10;
    if (found.kind == kBinary && runs) compiled = std::max(compiled, version);
    if (found.kind == kPtx && version <= card_version()) source = std::max(source, version);
    if (!found.header_size || found.size > (uint64_t)(end - entry)) break;
    entry += found.header_size + found.size;
  }
  return compiled ? compiled : source ? source : card_version();
}

API void** __cudaRegisterFatBinary(void* binary) {
  static std::mutex mutex;
  static std::unordered_map<int, void*> handles;  // torch has thousands of binaries, of few versions
  int version = version_that_runs((const FatBinary*)binary);
  std::lock_guard<std::mutex> guard(mutex);
  void*& handle = handles[version];
  handle = (void*)(intptr_t)version;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}

// Of each kernel: the function by which the host launches it, its name, and its architecture.
struct Kernel {
  const char* name;
  int version;
};
static std::vector<std::pair<const void*, Kernel>>& kernels() {
  static std::vector<std::pair<const void*, Kernel>> registered;
  return registered;
}
static std::mutex kernels_mutex;
// The architecture of kernels that were registered before this library was loaded; 0 for the card's own.
static std::atomic<int> version_of_earlier{0};
// `binary` is one of torch's, which all have kernels for the same architectures; null if none was found.
API void emulated_earlier_kernels_are_in(const FatBinary* binary) { version_of_earlier = version_that_runs(binary); }
API void __cudaRegisterFunction(void** binary, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  remember_nan_check(function, name);
  std::lock_guard<std::mutex> guard(kernels_mutex);
  kernels().push_back({function, {name, binary ? (int)(intptr_t)*binary : card_version()}});
}
static Kernel kernel_of(const void* function) {
  std::lock_guard<std::mutex> guard(kernels_mutex);
  static std::unordered_map<const void*, Kernel> known;  // made when one is asked for, which is rare
  static size_t count = 0;
  for (; count < kernels().size(); ++count) known.insert(kernels()[count]);
  auto found = known.find(function);
  if (found != known.end()) return found->second;
  return {"a kernel whose name is not known", version_of_earlier ? (int)version_of_earlier : card_version()};
}
static const char* kernel_name(const void* function) { return kernel_of(function).name; }
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
API int cudaFuncGetAttributes(void* out, const void* function) {
  int version = kernel_of(function).version;
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
