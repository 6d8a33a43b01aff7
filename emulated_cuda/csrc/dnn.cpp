// cuDNN. The real library does the host's work: descriptors, heuristics, plans of convolutions and attention, and
// the sizes of their workspaces. Since version 9.8 it can plan without the card, from a description of it
// ("deviceless ahead-of-time compilation"). This file has the functions that need a handle. Plans are not
// executed.
#include "dnn.hpp"
#include "pending.hpp"
#include "profiling.hpp"

#include <cstdio>
#include <cstring>

using Descriptor = void*;

enum : int {  // numbers of cuDNN's interface
  kPlanHandle = 400,
  kPlanDevice = 407,
  kHeuristicsGraph = 201,
  kHeuristicsDevice = 204,
  kGraphHandle = 800,
  kEngineGraph = 1300,
  kEngineDevice = 1307,
  kDeviceDescriptor = 38,
  kDeviceJson = 2702,
  kTypeDescriptor = 15,
  kTypeText = 24,
};

struct DnnHandle {
  Stream stream;
};
API int cudnnCreate(DnnHandle** handle) { return *handle = new DnnHandle{}, kSuccess; }
API int cudnnDestroy(DnnHandle* handle) { return delete handle, kSuccess; }
API int cudnnSetStream(DnnHandle* handle, Stream stream) { return handle->stream = stream, kSuccess; }
API int cudnnGetStream(DnnHandle* handle, Stream* stream) { return *stream = handle->stream, kSuccess; }

using SetAttribute = int(Descriptor, int, int, int64_t, const void*);

static Descriptor describe_card() {
  const Settings& card = settings;
  char json[2048];
  snprintf(json, sizeof json,
           "{\"deviceVer\":%d,\"multiProcessorCount\":%d,\"warpSize\":32,\"maxSharedMemoryPerBlock\":%d,"
           "\"maxSharedMemoryPerBlockOptin\":%d,\"reservedSharedMemoryPerBlock\":1024,"
           "\"oversizedSharedMemoryPerBlock\":0,\"smCountOrigin\":0,\"maxRegistersPerSM\":65536,"
           "\"maxCtasPerSM\":%d,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":%d,\"regsPerBlock\":65536,"
           "\"totalGlobalMem\":%lld,\"smClockRateKHz\":%d,\"l2CacheSize\":%d,\"maxBlockSize\":[1024,1024,64],"
           "\"memClockRateKHz\":%d,\"maxGridSize\":[2147483647,65535,65535],\"supportCoopLaunch\":1,"
           "\"pciDeviceId\":0,\"isTccDriver\":0,\"cudaDeviceId\":0,\"driverVer\":%d,\"deviceName\":\"%s\"}",
           (int)(card.major * 100 + card.minor * 10), (int)card.multiprocessors, (int)card.shared_per_block,
           (int)card.shared_per_block_opt_in, (int)card.blocks_per_multiprocessor,
           (int)card.threads_per_multiprocessor, (long long)card.total_bytes, (int)card.clock_khz,
           (int)card.l2_bytes, (int)card.memory_clock_khz, (int)card.cuda_version, card.name);
  Descriptor described = nullptr;
  auto set = real<SetAttribute>("cudnnBackendSetAttribute");
  if (real<int(int, Descriptor*)>("cudnnBackendCreateDescriptor")(kDeviceDescriptor, &described) ||
      set(described, kDeviceJson, kTypeText, (int64_t)strlen(json) + 1, json) ||
      real<int(Descriptor)>("cudnnBackendFinalize")(described))
    refuse_by_exception("cudnnBackendFinalize",
                        "cuDNN cannot plan this operation for this card. Emulate another card, or set "
                        "torch.backends.cudnn.enabled = False.");
  return described;
}

API int cudnnBackendSetAttribute(Descriptor descriptor, int name, int type, int64_t count, const void* value) {
  static auto set = real<SetAttribute>("cudnnBackendSetAttribute");
  auto set_card = [&](int attribute) {
    static Descriptor card = describe_card();
    return set(descriptor, attribute, kTypeDescriptor, 1, &card);
  };
  if (name == kGraphHandle) return kSuccess;  // without a handle
  if (name == kPlanHandle) return set_card(kPlanDevice);
  int status = set(descriptor, name, type, count, value);
  if (status) return status;
  if (name == kHeuristicsGraph) return set_card(kHeuristicsDevice);
  if (name == kEngineGraph) return set_card(kEngineDevice);
  return status;
}

// ---- Work: nothing is executed ----

constexpr int kExecutionFailed = 5000;
#define WORK(name)                                                   \
  API int cudnn##name(DnnHandle* handle) {                           \
    ProfiledCallScope profiled(kCallLaunch);                         \
    if (wait_for_stream(handle->stream)) return kExecutionFailed;    \
    count_work();                                                    \
    profiled.kernel("cudnn" #name, handle->stream);                  \
    note_work("cudnn" #name);                                        \
    return kSuccess;                                                 \
  }
WORK(BackendExecute)
WORK(BatchNormalizationForwardTrainingEx) WORK(BatchNormalizationBackwardEx) WORK(BatchNormalizationForwardInference)
WORK(PoolingForward)
WORK(RNNForward) WORK(RNNBackwardData_v8) WORK(RNNBackwardWeights_v8)
WORK(SpatialTfGridGeneratorForward) WORK(SpatialTfGridGeneratorBackward)
WORK(SpatialTfSamplerForward) WORK(SpatialTfSamplerBackward)
