// Every other function of the driver and of the runtime. Each is weak, so the files that have a function
// replace it: only those without one are left. They return an error whose text names the function.
//
// Libraries that look functions up by name print a line or give up if one is missing.
#include "emulated.hpp"

#include <cstring>

namespace {
struct Advice {
  const char *prefix, *text;
};
constexpr Advice kAdvices[] = {  // of the part of a name after "cu" or "cuda"; the first that fits
    {"Graphics", "There is no display to share memory with: use a GPU."},
    {"GL", "There is no display to share memory with: use a GPU."},
    {"EGL", "There is no display to share memory with: use a GPU."},
    {"VDPAU", "There is no display to share memory with: use a GPU."},
    {"Tex", "Textures, surfaces and arrays are not emulated: use linear memory."},
    {"Surf", "Textures, surfaces and arrays are not emulated: use linear memory."},
    {"Array", "Textures, surfaces and arrays are not emulated: use linear memory."},
    {"Mipmapped", "Textures, surfaces and arrays are not emulated: use linear memory."},
    {"MallocArray", "Textures, surfaces and arrays are not emulated: use linear memory."},
    {"Malloc3DArray", "Textures, surfaces and arrays are not emulated: use linear memory."},
    {"MallocMipmapped", "Textures, surfaces and arrays are not emulated: use linear memory."},
    {"CreateTexture", "Textures, surfaces and arrays are not emulated: use linear memory."},
    {"CreateSurface", "Textures, surfaces and arrays are not emulated: use linear memory."},
    {"Graph", "Capture the graph from a stream: nodes added by hand and changes of a graph are not emulated."},
    {"Ipc", "Memory of the device cannot be sent to another process: send tensors on the CPU, or use a GPU."},
    {"Import", "Memory of other programs or devices cannot be imported: use a GPU."},
    {"External", "Memory of other programs or devices cannot be imported: use a GPU."},
    {"MemAllocManaged", "Managed memory is not emulated: allocate device memory, or use a GPU."},
    {"MallocManaged", "Managed memory is not emulated: allocate device memory, or use a GPU."},
    {"MemPool", "Memory pools are emulated within one process only: use torch's allocator, or a GPU."},
    {"Multicast", "Symmetric memory is not emulated: use a GPU."},
    {"Link", "Kernels are not linked at run time: load a cubin, or use a GPU."},
    {"Library", "Variables and kernels of libraries are not emulated: use a GPU."},
    {"Module", "Variables of modules are not emulated: use a GPU."},
    {"DevResource", "Multiprocessors are the only emulated resource of a card: ask for a number of multiprocessors."},
    {"DevSm", "Split multiprocessors by their number (cuDevSmResourceSplitByCount), or use a GPU."},
};
const char* advice_of(const char* function) {
  const char* topic = function + (strncmp(function, "cuda", 4) ? 2 : 4);
  for (const Advice& advice : kAdvices)
    if (!strncmp(topic, advice.prefix, strlen(advice.prefix))) return advice.text;
  return "Leave out this call, or use a GPU.";
}
}  // namespace

// The driver has no error that is kept until it is asked for.
int refuse_of_driver(const char* function) {
  KeepLastError keep;
  return refuse(function, advice_of(function));
}

#define WEAK extern "C" __attribute__((visibility("default"), weak))
#define NAME(name) \
  WEAK int name() { return refuse_of_driver(#name); }
#include "driver_names.hpp"
#undef NAME
#define NAME(name) \
  WEAK int name() { return refuse(#name, advice_of(#name)); }
#include "runtime_names.hpp"
