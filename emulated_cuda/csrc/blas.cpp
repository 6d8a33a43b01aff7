// cuBLAS and cuBLASLt: handles and descriptors; every product succeeds without computing anything.
// Workspaces belong to torch, which allocates them and passes their addresses to the library. Torch chooses
// their sizes by the card's compute capability, which emulated_cuda/cards.py states.
#include "library_work.hpp"

#include <cstdlib>
#include <cstring>

struct Handle {
  int math_mode, pointer_mode;
  Stream stream;
};
constexpr int kExecutionFailed = 13;

static int product(Stream stream, const char* name) {
  return give_library_work(stream, name, "a product of cuBLAS") ? kSuccess : kExecutionFailed;
}

// ---- Handles ----

API int cublasCreate_v2(Handle** handle) { return *handle = new Handle{}, kSuccess; }
API int cublasDestroy_v2(Handle* handle) { return delete handle, kSuccess; }
API int cublasGetMathMode(Handle* handle, int* mode) { return *mode = handle->math_mode, kSuccess; }
API int cublasSetMathMode(Handle* handle, int mode) { return handle->math_mode = mode, kSuccess; }
API int cublasGetPointerMode_v2(Handle* handle, int* mode) { return *mode = handle->pointer_mode, kSuccess; }
API int cublasSetPointerMode_v2(Handle* handle, int mode) { return handle->pointer_mode = mode, kSuccess; }
API int cublasSetStream_v2(Handle* handle, Stream stream) { return handle->stream = stream, kSuccess; }
NOTHING_TO_DO(cublasSetWorkspace_v2) NOTHING_TO_DO(cublasSetSmCountTarget)

// ---- Products, by what they compute; their results stay in the device's memory ----

#define PRODUCT(name) \
  API int cublas##name(Handle* handle) { return product(handle->stream, "cublas" #name); }
#define SINGLE_DOUBLE(name) PRODUCT(S##name) PRODUCT(D##name)
#define COMPLEX(name) PRODUCT(C##name) PRODUCT(Z##name)
#define ALL(name) SINGLE_DOUBLE(name) COMPLEX(name)

ALL(gemm_v2) ALL(gemmBatched) ALL(gemmStridedBatched) PRODUCT(SgemmEx) PRODUCT(GemmEx) PRODUCT(GemmStridedBatchedEx)
ALL(gemv_v2) SINGLE_DOUBLE(ger_v2) COMPLEX(gerc_v2) COMPLEX(geru_v2)
SINGLE_DOUBLE(dot_v2) COMPLEX(dotc_v2) COMPLEX(dotu_v2) PRODUCT(DotEx)
ALL(axpy_v2) ALL(copy_v2) ALL(swap_v2) ALL(scal_v2) PRODUCT(Csscal_v2) PRODUCT(Zdscal_v2)
ALL(rot_v2) PRODUCT(Csrot_v2) PRODUCT(Zdrot_v2) SINGLE_DOUBLE(rotm_v2)
ALL(symm_v2) ALL(symv_v2) ALL(syr_v2) ALL(syr2_v2) ALL(syr2k_v2) ALL(syrk_v2)
COMPLEX(hemm_v2) COMPLEX(hemv_v2) COMPLEX(her_v2) COMPLEX(her2_v2) COMPLEX(her2k_v2) COMPLEX(herk_v2)
ALL(trmm_v2) ALL(trmv_v2) ALL(trsm_v2) ALL(trsmBatched) ALL(trsv_v2)
ALL(getrfBatched)

// These report errors in their arguments to the host.
#define REPORTING(name, ...)                                          \
  API int cublas##name(Handle* handle, __VA_ARGS__, int* info, ...) { \
    return *info = 0, product(handle->stream, "cublas" #name);        \
  }
#define ALL_REPORTING(name, ...)                                      \
  REPORTING(S##name, __VA_ARGS__) REPORTING(D##name, __VA_ARGS__)     \
  REPORTING(C##name, __VA_ARGS__) REPORTING(Z##name, __VA_ARGS__)
ALL_REPORTING(geqrfBatched, int, int, void*, int, void*)
ALL_REPORTING(getrsBatched, int, int, int, void*, int, void*, void*, int)
ALL_REPORTING(gelsBatched, int, int, int, int, void*, int, void*, int)

// ---- cuBLASLt ----

static int create_descriptor(void** descriptor) { return *descriptor = calloc(1, 64), kSuccess; }
static int destroy_descriptor(void* descriptor) { return free(descriptor), kSuccess; }
#define DESCRIPTOR(kind)                                                                           \
  API int cublasLt##kind##Create(void** descriptor) { return create_descriptor(descriptor); }      \
  API int cublasLt##kind##Destroy(void* descriptor) { return destroy_descriptor(descriptor); }     \
  API int cublasLt##kind##SetAttribute() { return kSuccess; }
DESCRIPTOR(MatmulDesc) DESCRIPTOR(MatrixLayout) DESCRIPTOR(MatmulPreference)

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Heuristic) == 96, "torch allocates this structure");
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* results, int* count) {
  memset(results, 0, sizeof *results);
  return *count = 1, kSuccess;
}
API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                       void*, void*, const void*, void*, size_t, Stream stream) {
  return product(stream, "cublasLtMatmul");
}
NOTHING_TO_DO(cublasLtMatmulAlgoInit) NOTHING_TO_DO(cublasLtMatmulAlgoConfigSetAttribute)
API int cublasLtMatmulAlgoCheck(void*, void*, void*, void*, void*, void*, const void*, Heuristic* result) {
  return memset(result, 0, sizeof *result), kSuccess;
}
API size_t cublasLtGetVersion() { return settings.cuda_version * 10; }
