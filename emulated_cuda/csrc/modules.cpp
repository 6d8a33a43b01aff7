// The driver's modules and launches: kernels compiled at run time, by torch and by Triton.
//
// Nothing is executed here. Python may know what a kernel of a module computes, by the bytes of its
// cubin; then it is called at each launch with the arguments. Other launches are noted as unknown work.
#include "launches.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "graphs.hpp"
#include "profiling.hpp"

namespace {
struct Module {
  uint64_t key;  // 0 if the image is no cubin
};
struct Function {
  uint64_t key;
  std::string name;
};
std::mutex modules_mutex;

// ---- Keys of cubins, which are ELF files ----

template <class T>
T field(const char* image, size_t at) {
  T found;
  memcpy(&found, image + at, sizeof found);
  return found;
}
size_t size_of(const char* image) {
  if (memcmp(image, "\177ELF\2", 5)) return 0;
  uint64_t programs = field<uint64_t>(image, 32) + (uint64_t)field<uint16_t>(image, 54) * field<uint16_t>(image, 56);
  uint64_t sections = field<uint64_t>(image, 40) + (uint64_t)field<uint16_t>(image, 58) * field<uint16_t>(image, 60);
  return programs > sections ? programs : sections;
}
uint64_t key_of(const char* image) {  // FNV-1a
  uint64_t key = 14695981039346656037u;
  size_t size = size_of(image);
  for (size_t i = 0; i < size; ++i) key = (key ^ (unsigned char)image[i]) * 1099511628211u;
  return size ? key : 0;
}

// ---- Python, which knows what some kernels compute ----

// Computes a launch; returns 0, an error of the driver, or kUnknownKernel.
using Compute = int (*)(uint64_t key, const char* name, unsigned x, unsigned y, unsigned z, void** arguments, Stream);
constexpr int kUnknownKernel = -1;
std::atomic<Compute> compute{nullptr};
std::atomic<void (*)(uint64_t key, const char* path)> on_file{nullptr};

// Raises an exception in Python at the next instruction of this thread, because none passes through
// the code that launches. `type` is a Python object that lives as long as the process.
thread_local void* exception_type = nullptr;
thread_local unsigned long python_thread = 0;
void raise_later() {
  static auto ensure = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  static auto release = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
  static auto raise = (int (*)(unsigned long, void*))dlsym(RTLD_DEFAULT, "PyThreadState_SetAsyncExc");
  if (!ensure || !release || !raise) return;
  int state = ensure();
  raise(python_thread, std::exchange(exception_type, nullptr));
  release(state);
}

// Whether values are wanted and nothing can compute them yet, because torch was not imported.
std::atomic<int> refuses_launches{0};

int launch(const void* handle, Dim3 grid, Dim3 block, size_t shared, Stream stream, void** arguments) {
  if (refuses_launches) {
    KeepLastError keep;
    return refuse("A launch of a kernel without torch",
                  "Import torch first for kernels of Triton; kernels of your own are not computed.");
  }
  ProfiledCallScope profiled(kCallDriverLaunch);
  if (int error = check_launch(grid, block, shared, stream)) return error;
  if (handle) profiled.kernel(((const Function*)handle)->name.c_str(), stream, grid, block, shared);
  if (!values_are_computed || phase() != kNoOperator) return kSuccess;
  auto function = (const Function*)handle;
  Compute known = compute;
  if (function && function->key && known && arguments) {
    int code = known(function->key, function->name.c_str(), grid.x, grid.y, grid.z, arguments, stream);
    if (exception_type) raise_later();
    if (code != kUnknownKernel) return code;
  }
  const char* name = function ? function->name.c_str() : "a kernel whose name is not known";
  if (!record_work(stream, name, nullptr, nullptr, 0)) note_work(name);
  return kSuccess;
}
}  // namespace

API void emulated_raise_later(unsigned long thread, void* type) {
  python_thread = thread;
  exception_type = type;
}
API void emulated_refuse_launches(int on) { refuses_launches = on; }
API uint64_t emulated_key_of(const char* image) { return key_of(image); }
// `computer` gets each launch of a kernel of a cubin; `reader` each cubin that is loaded from a file.
API void emulated_compute_launches(Compute computer, void (*reader)(uint64_t, const char*)) {
  compute = computer;
  on_file = reader;
}

// ---- Modules and functions ----

static int load(void** module, uint64_t key) { return *module = new Module{key}, kSuccess; }
static int load(void** module, const char* image) { return image ? load(module, key_of(image)) : kInvalidValue; }
API int cuModuleLoad(void** module, const char* path) {
  if (!path) return kInvalidValue;
  std::ifstream file(path, std::ios::binary);
  if (!file) return kFileNotFound;
  std::string image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  uint64_t key = image.size() > 64 && size_of(image.data()) <= image.size() ? key_of(image.data()) : 0;
  if (auto read = on_file.load(); read && key) read(key, path);
  return load(module, key);
}
API int cuModuleLoadData(void** module, const char* image) { return load(module, image); }
API int cuModuleLoadDataEx(void** module, const char* image, unsigned, void*, void**) {
  return load(module, image);
}
API int cuModuleUnload(void* module) { return module ? (delete (Module*)module, kSuccess) : kInvalidHandle; }
// A function is kept for the life of the process: code may launch it after its module was unloaded.
API int cuModuleGetFunction(void** function, void* module, const char* name) {
  static std::map<std::pair<uint64_t, std::string>, Function> functions;
  if (!name) return kInvalidValue;
  std::lock_guard<std::mutex> guard(modules_mutex);
  uint64_t key = module ? ((Module*)module)->key : 0;
  *function = &functions.insert({{key, name}, {key, name}}).first->second;
  return kSuccess;
}
API int cuFuncSetAttribute(void*, int which, int value) { return set_kernel_attribute(which, value); }
API int cuFuncGetAttribute(int* value, int which, void*) {
  return *value = which == 0 ? 1024 : which == 4 ? 32 : 0, kSuccess;  // threads of a block, registers
}
NOTHING_TO_DO(cuFuncSetCacheConfig)
API int cuFuncGetName(const char** name, const Function* function) {
  return function ? (*name = function->name.c_str(), kSuccess) : kInvalidValue;
}

// ---- Libraries: modules that are loaded for all contexts; their kernels are functions ----

API int cuLibraryLoadData(void** library, const char* image, void*, void**, unsigned, void*, void**, unsigned) {
  return load(library, image);
}
API int cuLibraryLoadFromFile(void** library, const char* path, void*, void**, unsigned, void*, void**, unsigned) {
  return cuModuleLoad(library, path);
}
API int cuLibraryUnload(void* library) { return cuModuleUnload(library); }
API int cuLibraryGetModule(void** module, void* library) { return *module = library, kSuccess; }
API int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  return cuModuleGetFunction(kernel, library, name);
}
API int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, kSuccess; }
API int cuKernelGetName(const char** name, const Function* kernel) { return cuFuncGetName(name, kernel); }
API int cuKernelGetAttribute(int* value, int which, void* kernel, int) {
  return cuFuncGetAttribute(value, which, kernel);
}
API int cuKernelSetAttribute(int which, int value, void* kernel, int) {
  KeepLastError keep;
  return cuFuncSetAttribute(kernel, which, value);
}

// ---- Launches ----

API int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                       Stream stream, void** arguments, void**) {
  return launch(function, {x, y, z}, {bx, by, bz}, shared, stream, arguments);
}
API int cuLaunchCooperativeKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                                  unsigned shared, Stream stream, void** arguments) {
  return launch(function, {x, y, z}, {bx, by, bz}, shared, stream, arguments);
}
struct DriverLaunch {
  Dim3 grid, block;
  unsigned shared;
  Stream stream;
};
API int cuLaunchKernelEx(const DriverLaunch* wanted, void* function, void** arguments, void**) {
  if (!wanted) return kInvalidValue;
  return launch(function, wanted->grid, wanted->block, wanted->shared, wanted->stream, arguments);
}

// ---- Descriptors of tensors ----

// `TensorMap` in triton/descriptors.py. CUDA's structure has 128 bytes and is opaque.
struct TensorMap {
  uint64_t address;
  int32_t type, rank;
  uint64_t lengths[5];  // the innermost first
  uint64_t strides[5];  // in bytes; that of the innermost is the size of an element and not given
  int32_t nan;
};
static_assert(sizeof(TensorMap) <= 128, "a CUtensorMap has 128 bytes");
API int cuTensorMapEncodeTiled(void* out, int type, unsigned rank, void* address, const uint64_t* lengths,
                               const uint64_t* strides, const uint32_t*, const uint32_t*, int, int, int, int fill) {
  if (rank < 1 || rank > 5) return kInvalidValue;
  TensorMap map = {(uint64_t)address, type, (int)rank, {}, {}, fill};
  for (unsigned i = 0; i < rank; ++i) map.lengths[i] = lengths[i];
  for (unsigned i = 0; i + 1 < rank; ++i) map.strides[i + 1] = strides[i];
  memset(out, 0, 128);
  memcpy(out, &map, sizeof map);
  return kSuccess;
}
