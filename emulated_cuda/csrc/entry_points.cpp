// Finding functions of the driver by name, as the runtime, torch and libraries of others do.
#include "emulated.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

namespace {
// Names whose newest form has other arguments than the one before, and the version that brought it. All
// other forms are older than the versions of CUDA for which torch is built.
constexpr struct {
  const char* name;
  int version;
} kNewForms[] = {
    {"cuCtxGetDevice_v2", 13000}, {"cuCtxSynchronize_v2", 13000}, {"cuEventElapsedTime_v2", 12080},
    {"cuMemcpyBatchAsync_v2", 13000}, {"cuMemcpy3DBatchAsync_v2", 13000}, {"cuStreamGetCtx_v2", 12050},
    {"cuCtxCreate_v4", 12050}, {"cuCtxCreate_v3", 11040}, {"cuDeviceGetUuid_v2", 11040},
    {"cuStreamGetCaptureInfo_v3", 12030}, {"cuStreamGetCaptureInfo_v2", 11030},
    {"cuStreamUpdateCaptureDependencies_v2", 12030}, {"cuMemAdvise_v2", 12020}, {"cuMemPrefetchAsync_v2", 12020},
    {"cuGraphAddDependencies_v2", 12030}, {"cuGraphAddNode_v2", 12030}, {"cuGraphGetEdges_v2", 12030},
    {"cuGraphNodeGetDependencies_v2", 12030}, {"cuGraphNodeGetDependentNodes_v2", 12030},
    {"cuGraphRemoveDependencies_v2", 12030}, {"cuGraphAddKernelNode_v2", 12000},
    {"cuGraphKernelNodeGetParams_v2", 12000}, {"cuGraphKernelNodeSetParams_v2", 12000},
    {"cuGraphExecKernelNodeSetParams_v2", 12000}, {"cuGraphExecUpdate_v2", 12000}, {"cuGetProcAddress_v2", 12000},
    {"cuLaunchHostFunc_v2", 13041},
};
int version_of(const char* name) {
  for (auto& form : kNewForms)
    if (!strcmp(form.name, name)) return form.version;
  return 0;
}
enum Found : int { kFound = 0, kNoSuchSymbol = 1 };

int entry_point(const char* name, void** function, int version, int* result) {
  static void* self = [] {
    Dl_info info;
    return dladdr((void*)&entry_point, &info) ? dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY) : nullptr;
  }();
  *function = nullptr;
  bool is_of_driver = !strncmp(name, "cu", 2) && strlen(name) < 100;
  for (int form = 4; form >= 1 && is_of_driver && self && !*function; --form) {
    char exported[128];
    snprintf(exported, sizeof exported, form > 1 ? "%s_v%d" : "%s", name, form);
    if (version_of(exported) <= version) *function = dlsym(self, exported);
  }
  if (result) *result = *function ? kFound : kNoSuchSymbol;
  return kSuccess;
}
}  // namespace

// The flags ask for the forms with a default stream of each thread. Work is done when it is given, so
// they are the same.
API int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t, int* result) {
  if (!name || !function) return kInvalidValue;
  entry_point(name, function, version, result);
  return *function ? kSuccess : kNotFound;
}
API int cuGetProcAddress(const char* name, void** function, int version, uint64_t) {
  return cuGetProcAddress_v2(name, function, version, 0, nullptr);
}
API int cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, int* result) {
  return entry_point(name, function, (int)settings.cuda_version, result);
}
API int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                         int* result) {
  return entry_point(name, function, (int)version, result);
}
// NVIDIA's own libraries ask for private interfaces here, and do without if there are none.
API int cuGetExportTable(const void** table, const void*) {
  if (table) *table = nullptr;
  return kNotFound;
}
