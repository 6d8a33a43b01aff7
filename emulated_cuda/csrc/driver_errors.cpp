// Names and texts of the driver's errors.
#include "emulated.hpp"

#include <cctype>
#include <map>
#include <string>

extern "C" const char* cudaGetErrorName(int error);
extern "C" const char* cudaGetErrorString(int error);

namespace {
struct Error {
  int number;
  const char* name;  // without CUDA_ERROR_
};
constexpr Error kErrors[] = {
    {1, "INVALID_VALUE"}, {2, "OUT_OF_MEMORY"}, {3, "NOT_INITIALIZED"}, {4, "DEINITIALIZED"},
    {5, "PROFILER_DISABLED"}, {6, "PROFILER_NOT_INITIALIZED"}, {7, "PROFILER_ALREADY_STARTED"},
    {8, "PROFILER_ALREADY_STOPPED"}, {34, "STUB_LIBRARY"}, {36, "CALL_REQUIRES_NEWER_DRIVER"},
    {46, "DEVICE_UNAVAILABLE"}, {100, "NO_DEVICE"}, {101, "INVALID_DEVICE"}, {102, "DEVICE_NOT_LICENSED"},
    {200, "INVALID_IMAGE"}, {201, "INVALID_CONTEXT"}, {202, "CONTEXT_ALREADY_CURRENT"}, {205, "MAP_FAILED"},
    {206, "UNMAP_FAILED"}, {207, "ARRAY_IS_MAPPED"}, {208, "ALREADY_MAPPED"}, {209, "NO_BINARY_FOR_GPU"},
    {210, "ALREADY_ACQUIRED"}, {211, "NOT_MAPPED"}, {212, "NOT_MAPPED_AS_ARRAY"}, {213, "NOT_MAPPED_AS_POINTER"},
    {214, "ECC_UNCORRECTABLE"}, {215, "UNSUPPORTED_LIMIT"}, {216, "CONTEXT_ALREADY_IN_USE"},
    {217, "PEER_ACCESS_UNSUPPORTED"}, {218, "INVALID_PTX"}, {219, "INVALID_GRAPHICS_CONTEXT"},
    {220, "NVLINK_UNCORRECTABLE"}, {221, "JIT_COMPILER_NOT_FOUND"}, {222, "UNSUPPORTED_PTX_VERSION"},
    {223, "JIT_COMPILATION_DISABLED"}, {224, "UNSUPPORTED_EXEC_AFFINITY"}, {225, "UNSUPPORTED_DEVSIDE_SYNC"},
    {226, "CONTAINED"}, {300, "INVALID_SOURCE"}, {301, "FILE_NOT_FOUND"}, {302, "SHARED_OBJECT_SYMBOL_NOT_FOUND"},
    {303, "SHARED_OBJECT_INIT_FAILED"}, {304, "OPERATING_SYSTEM"}, {400, "INVALID_HANDLE"}, {401, "ILLEGAL_STATE"},
    {402, "LOSSY_QUERY"}, {500, "NOT_FOUND"}, {600, "NOT_READY"}, {700, "ILLEGAL_ADDRESS"},
    {701, "LAUNCH_OUT_OF_RESOURCES"}, {702, "LAUNCH_TIMEOUT"}, {703, "LAUNCH_INCOMPATIBLE_TEXTURING"},
    {704, "PEER_ACCESS_ALREADY_ENABLED"}, {705, "PEER_ACCESS_NOT_ENABLED"}, {708, "PRIMARY_CONTEXT_ACTIVE"},
    {709, "CONTEXT_IS_DESTROYED"}, {710, "ASSERT"}, {711, "TOO_MANY_PEERS"}, {712, "HOST_MEMORY_ALREADY_REGISTERED"},
    {713, "HOST_MEMORY_NOT_REGISTERED"}, {714, "HARDWARE_STACK_ERROR"}, {715, "ILLEGAL_INSTRUCTION"},
    {716, "MISALIGNED_ADDRESS"}, {717, "INVALID_ADDRESS_SPACE"}, {718, "INVALID_PC"}, {719, "LAUNCH_FAILED"},
    {720, "COOPERATIVE_LAUNCH_TOO_LARGE"}, {721, "TENSOR_MEMORY_LEAK"}, {800, "NOT_PERMITTED"},
    {801, "NOT_SUPPORTED"}, {802, "SYSTEM_NOT_READY"}, {803, "SYSTEM_DRIVER_MISMATCH"},
    {804, "COMPAT_NOT_SUPPORTED_ON_DEVICE"}, {805, "MPS_CONNECTION_FAILED"}, {806, "MPS_RPC_FAILURE"},
    {807, "MPS_SERVER_NOT_READY"}, {808, "MPS_MAX_CLIENTS_REACHED"}, {809, "MPS_MAX_CONNECTIONS_REACHED"},
    {810, "MPS_CLIENT_TERMINATED"}, {811, "CDP_NOT_SUPPORTED"}, {812, "CDP_VERSION_MISMATCH"},
    {900, "STREAM_CAPTURE_UNSUPPORTED"}, {901, "STREAM_CAPTURE_INVALIDATED"}, {902, "STREAM_CAPTURE_MERGE"},
    {903, "STREAM_CAPTURE_UNMATCHED"}, {904, "STREAM_CAPTURE_UNJOINED"}, {905, "STREAM_CAPTURE_ISOLATION"},
    {906, "STREAM_CAPTURE_IMPLICIT"}, {907, "CAPTURED_EVENT"}, {908, "STREAM_CAPTURE_WRONG_THREAD"}, {909, "TIMEOUT"},
    {910, "GRAPH_EXEC_UPDATE_FAILURE"}, {911, "EXTERNAL_DEVICE"}, {912, "INVALID_CLUSTER_SIZE"},
    {913, "FUNCTION_NOT_LOADED"}, {914, "INVALID_RESOURCE_TYPE"}, {915, "INVALID_RESOURCE_CONFIGURATION"},
    {916, "KEY_ROTATION"}, {999, "UNKNOWN"},
};
struct Texts {
  std::string name, text;
};
// NVIDIA's texts say the same as the names. Those of the errors that the emulated device itself returns
// are the runtime's, and may be a refusal of this thread.
std::map<int, Texts> all_texts() {
  std::map<int, Texts> found = {{kSuccess, {"CUDA_SUCCESS", "no error"}}};
  for (const Error& error : kErrors) {
    std::string text = error.name;
    for (char& letter : text) letter = letter == '_' ? ' ' : (char)tolower(letter);
    found[error.number] = {std::string("CUDA_ERROR_") + error.name, text};
  }
  return found;
}
}  // namespace

int driver_error_texts(int error, const char** name, const char** text) {
  static const std::map<int, Texts> known = all_texts();
  auto found = known.find(error);
  if (name) *name = found == known.end() ? nullptr : found->second.name.c_str();
  if (text) *text = found == known.end() ? nullptr : found->second.text.c_str();
  if (found == known.end()) return kInvalidValue;
  bool is_of_runtime = std::string(cudaGetErrorName(error)) != "cudaErrorUnknown";
  if (text && is_of_runtime) *text = cudaGetErrorString(error);
  return kSuccess;
}
