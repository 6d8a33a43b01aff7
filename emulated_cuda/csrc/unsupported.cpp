// What is not supported. Each function raises in Python, and its message names the function and what
// to do: the runtime's and the driver's by a code whose text torch asks for, the others' by an exception.
#include "emulated.hpp"

#include <cstdio>
#include <stdexcept>
#include <string>

static thread_local char text[512] = "not supported by the emulated device";

static const char* describe(const char* function, const char* advice) {
  snprintf(text, sizeof text, "%s is not supported by the emulated device, because there is no GPU. %s", function, advice);
  return text;
}
int refuse(const char* function, const char* advice) {
  describe(function, advice);
  return fail(kNotSupported);
}
int fail_work(const char* problem, int code) {
  snprintf(text, sizeof text, "%s", problem);
  return fail(code);
}
API int emulated_fail_work(const char* problem, int code) { return fail_work(problem, code); }
const char* refusal_text() { return text; }
void refuse_by_exception(const char* function, const char* advice) {
  throw std::runtime_error(describe(function, advice));
}

#define REFUSED(name) \
  API int name() { return refuse(#name, kAdvice); }

namespace graphs {
constexpr const char* kAdvice =
    "Capture the graph from a stream: nodes added by hand, conditional nodes and the reuse of memory within a capture "
    "(graph_capture_record_stream_reuse) are not emulated.";
REFUSED(cudaStreamBeginCaptureToGraph) REFUSED(cudaStreamUpdateCaptureDependencies) REFUSED(cudaGraphAddEmptyNode)
REFUSED(cudaGraphAddNode) REFUSED(cudaGraphConditionalHandleCreate) REFUSED(cudaGraphNodeGetDependencies)
REFUSED(cudaGraphNodeGetType)
}  // namespace graphs

namespace sharing {
constexpr const char* kAdvice =
    "Tensors on the device cannot be sent to another process: send tensors on the CPU, or use a GPU.";
REFUSED(cudaIpcCloseMemHandle) REFUSED(cudaIpcGetEventHandle) REFUSED(cudaIpcGetMemHandle)
REFUSED(cudaIpcOpenEventHandle) REFUSED(cudaIpcOpenMemHandle) REFUSED(cuMemExportToShareableHandle)
REFUSED(cuMemImportFromShareableHandle) REFUSED(cuMemRetainAllocationHandle)
REFUSED(cuMemGetAllocationPropertiesFromHandle)
}  // namespace sharing

namespace managed {
constexpr const char* kAdvice = "Managed memory is not emulated: allocate with torch's usual functions, or use a GPU.";
REFUSED(cudaMallocManaged)
}  // namespace managed

namespace symmetric {
constexpr const char* kAdvice = "Symmetric memory is not emulated: use a GPU.";
REFUSED(cuMulticastAddDevice) REFUSED(cuMulticastBindMem) REFUSED(cuMulticastCreate) REFUSED(cuMulticastUnbind)
REFUSED(cuStreamWriteValue32)
}  // namespace symmetric

namespace modules {
constexpr const char* kAdvice = "Kernels linked or loaded from files are not emulated: use a GPU.";
REFUSED(cuLinkAddData_v2) REFUSED(cuLinkComplete) REFUSED(cuLinkCreate_v2) REFUSED(cudaKernelSetAttributeForDevice)
REFUSED(cudaLibraryGetGlobal) REFUSED(cudaLibraryGetKernel) REFUSED(cudaLibraryGetKernelCount)
REFUSED(cudaLibraryGetManaged) REFUSED(cudaLibraryGetUnifiedFunction) REFUSED(cudaLibraryLoadData)
REFUSED(cudaLibraryLoadFromFile) REFUSED(cudaLibraryUnload)
}  // namespace modules

namespace sparse {
constexpr const char* kAdvice =
    "The workspaces of cuSPARSE are not known without a GPU: call the operator on the CPU (tensor.cpu()), or measure "
    "on a GPU.";
RAISED(cusparseCreate)
}  // namespace sparse

namespace semi_structured {
constexpr const char* kAdvice =
    "Weights with 2:4 sparsity are not emulated: leave out torch.sparse.to_sparse_semi_structured (the dense weight "
    "gives the same values), or use a GPU.";
// torch calls the second alone if it was refused before.
RAISED(cusparseLtInit) RAISED(cusparseLtStructuredDescriptorInit)
}  // namespace semi_structured

namespace blas {
constexpr const char* kAdvice =
    "The host needs its result, but no kernel runs: call the operator on the CPU (tensor.cpu()), or use a GPU.";
RAISED(cublasIsamax_v2) RAISED(cublasIdamax_v2) RAISED(cublasIcamax_v2) RAISED(cublasIzamax_v2)
RAISED(cublasIsamin_v2) RAISED(cublasIdamin_v2) RAISED(cublasIcamin_v2) RAISED(cublasIzamin_v2)
RAISED(cublasSasum_v2) RAISED(cublasDasum_v2) RAISED(cublasScasum_v2) RAISED(cublasDzasum_v2)
RAISED(cublasSnrm2_v2) RAISED(cublasDnrm2_v2) RAISED(cublasScnrm2_v2) RAISED(cublasDznrm2_v2)
RAISED(cublasSrotg_v2) RAISED(cublasDrotg_v2) RAISED(cublasCrotg_v2) RAISED(cublasZrotg_v2)
RAISED(cublasGetMatrixAsync) RAISED(cublasSetMatrixAsync) RAISED(cublasGetVectorAsync) RAISED(cublasSetVectorAsync)
RAISED(cublasSrotmg_v2) RAISED(cublasDrotmg_v2) RAISED(cublasLtMatmulAlgoConfigGetAttribute)
}  // namespace blas

namespace ctc {
constexpr const char* kAdvice =
    "cuDNN does not plan its CTC loss without a GPU: measure on a GPU, or set torch.backends.cudnn.enabled = False to "
    "use torch's own CTC loss, which takes other memory.";
RAISED(cudnnCTCLoss) RAISED(cudnnCTCLoss_v8) RAISED(cudnnGetCTCLossWorkspaceSize) RAISED(cudnnGetCTCLossWorkspaceSize_v8)
}  // namespace ctc

namespace convolutions {  // of cuDNN's older interface; those of the newer one are planned: see dnn.cpp
constexpr const char* kAdvice =
    "cuDNN's older convolutions cannot be planned without a GPU: unset TORCH_CUDNN_V8_API_DISABLED.";
RAISED(cudnnConvolutionForward) RAISED(cudnnConvolutionBackwardData) RAISED(cudnnConvolutionBackwardFilter)
RAISED(cudnnConvolutionBiasActivationForward) RAISED(cudnnFindConvolutionForwardAlgorithmEx)
RAISED(cudnnFindConvolutionBackwardDataAlgorithmEx) RAISED(cudnnFindConvolutionBackwardFilterAlgorithmEx)
RAISED(cudnnGetConvolutionForwardAlgorithm_v7) RAISED(cudnnGetConvolutionBackwardDataAlgorithm_v7)
RAISED(cudnnGetConvolutionBackwardFilterAlgorithm_v7) RAISED(cudnnGetConvolutionForwardWorkspaceSize)
RAISED(cudnnGetConvolutionBackwardDataWorkspaceSize) RAISED(cudnnGetConvolutionBackwardFilterWorkspaceSize)
}  // namespace convolutions

namespace files {
constexpr const char* kAdvice = "GPUDirect Storage needs a GPU: read the file into a tensor on the CPU.";
RAISED(cuFileBufDeregister) RAISED(cuFileBufRegister) RAISED(cuFileHandleDeregister) RAISED(cuFileHandleRegister)
RAISED(cuFileRead) RAISED(cuFileWrite)
}  // namespace files

// ---- The profiler: it finds no device to trace, and records the CPU only ----

NOTHING_TO_DO(cudaProfilerStart) NOTHING_TO_DO(cudaProfilerStop)
