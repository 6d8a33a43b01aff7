// cuSOLVER: decompositions that decompose nothing, and the sizes of their workspaces, which torch allocates.
// solver_sizes.hpp has the rules for the sizes. The functions whose sizes no card was asked for are refused.
#include "library_work.hpp"
#include "solver_sizes.hpp"

#include <climits>

struct Solver {
  Stream stream;
};
constexpr const char* kAdvice =
    "The workspaces of this function are not known without a GPU: compute this on the CPU (tensor.cpu()), or measure "
    "on a GPU.";
constexpr int kInvalidSize = 3, kExecutionFailed = 6;  // cusolverStatus_t

static int factorize(Solver* solver, const char* name) {
  return give_library_work(solver->stream, name, "a function of cuSOLVER") ? kSuccess : kExecutionFailed;
}
#define FACTORIZES(name) \
  API int cusolverDn##name(Solver* solver) { return factorize(solver, "cusolverDn" #name); }

// ---- Handles ----

API int cusolverDnCreate(Solver** solver) { return *solver = new Solver{}, kSuccess; }
API int cusolverDnDestroy(Solver* solver) { return delete solver, kSuccess; }
API int cusolverDnSetStream(Solver* solver, Stream stream) { return solver->stream = stream, kSuccess; }

// Settings, which change no size.
#define SETTINGS(kind)                                                                                    \
  API int cusolverDnCreate##kind(void** settings) { return *settings = new char, kSuccess; }              \
  API int cusolverDnDestroy##kind(void* settings) { return delete (char*)settings, kSuccess; }
SETTINGS(Params) SETTINGS(GesvdjInfo) SETTINGS(SyevjInfo)
NOTHING_TO_DO(cusolverDnXgesvdjSetMaxSweeps) NOTHING_TO_DO(cusolverDnXgesvdjSetSortEig)
NOTHING_TO_DO(cusolverDnXgesvdjSetTolerance)

// ---- Functions of one type, which count in its elements ----

// The library refuses sizes that the number of elements does not fit.
static int count_elements(int* size, int64_t elements) {
  if (elements > INT_MAX) return kInvalidSize;
  return *size = (int)elements, kSuccess;
}

#define OF_TYPE(letter, bytes)                                                                                     \
  API int cusolverDn##letter##getrf_bufferSize(Solver*, int m, int n, void*, int, int* size) {                     \
    return count_elements(size, (128 + sizes::lu_bytes(m, n, bytes)) / bytes);                                     \
  }                                                                                                                \
  API int cusolverDn##letter##geqrf_bufferSize(Solver*, int, int n, void*, int, int* size) {                       \
    return count_elements(size, sizes::qr(n));                                                                     \
  }                                                                                                                \
  API int cusolverDn##letter##potrf_bufferSize(Solver*, int, int n, void*, int, int* size) {                       \
    return count_elements(size, sizes::cholesky_bytes(n) / bytes);                                                 \
  }                                                                                                                \
  API int cusolverDn##letter##sytrf_bufferSize(Solver*, int n, void*, int, int* size) {                            \
    return count_elements(size, sizes::ldl(n, bytes));                                                             \
  }                                                                                                                \
  API int cusolverDn##letter##gesvd_bufferSize(Solver*, int m, int n, int* size) {                                 \
    return count_elements(size, sizes::singular_values(m, n));                                                     \
  }                                                                                                                \
  API int cusolverDn##letter##gesvdj_bufferSize(Solver*, int, int thin, int m, int n, void*, int, void*, void*,    \
                                                int, void*, int, int* size, void*) {                               \
    return count_elements(size, sizes::jacobi_singular_values(m, n, thin));                                        \
  }                                                                                                                \
  API int cusolverDn##letter##gesvdjBatched_bufferSize(Solver*, int, int, int, void*, int, void*, void*, int,      \
                                                       void*, int, int* size, void*, int) {                        \
    return count_elements(size, sizes::kJacobiSingularValuesOfBatch);                                              \
  }                                                                                                                \
  FACTORIZES(letter##getrf) FACTORIZES(letter##getrs) FACTORIZES(letter##geqrf) FACTORIZES(letter##potrf)          \
  FACTORIZES(letter##potrs) FACTORIZES(letter##potrfBatched) FACTORIZES(letter##potrsBatched)                      \
  FACTORIZES(letter##sytrf) FACTORIZES(letter##gesvd) FACTORIZES(letter##gesvdj) FACTORIZES(letter##gesvdjBatched)
OF_TYPE(S, 4) OF_TYPE(D, 8) OF_TYPE(C, 8) OF_TYPE(Z, 16)

// These have two names: one for real numbers, one for complex ones.
#define Q_OF_REFLECTORS(name)                                                                           \
  API int cusolverDn##name##_bufferSize(Solver*, int m, int n, int k, void*, int, void*, int* size) {   \
    return count_elements(size, sizes::q(m, n, k));                                                     \
  }                                                                                                     \
  FACTORIZES(name)
Q_OF_REFLECTORS(Sorgqr) Q_OF_REFLECTORS(Dorgqr) Q_OF_REFLECTORS(Cungqr) Q_OF_REFLECTORS(Zungqr)

constexpr int kLeft = 0;
#define PRODUCT_WITH_Q(name)                                                                                     \
  API int cusolverDn##name##_bufferSize(Solver*, int side, int, int m, int n, int k, void*, int, void*, void*,   \
                                        int, int* size) {                                                        \
    if (side != kLeft) refuse_by_exception("cusolverDn" #name "_bufferSize with Q on the right", kAdvice);       \
    return count_elements(size, sizes::product_with_q(m, n, k));                                                 \
  }                                                                                                              \
  FACTORIZES(name)
PRODUCT_WITH_Q(Sormqr) PRODUCT_WITH_Q(Dormqr) PRODUCT_WITH_Q(Cunmqr) PRODUCT_WITH_Q(Zunmqr)

#define SYMMETRIC(name)                                                                                            \
  API int cusolverDn##name##d_bufferSize(Solver*, int, int, int n, void*, int, void*, int* size) {                 \
    return count_elements(size, sizes::symmetric_eigenvalues(n, 1));                                               \
  }                                                                                                                \
  API int cusolverDn##name##j_bufferSize(Solver*, int, int, int n, void*, int, void*, int* size, void*) {          \
    return count_elements(size, sizes::jacobi_eigenvalues(n));                                                     \
  }                                                                                                                \
  API int cusolverDn##name##jBatched_bufferSize(Solver*, int, int, int n, void*, int, void*, int* size, void*,     \
                                                int batch) {                                                       \
    return count_elements(size, sizes::jacobi_eigenvalues_of_batch(n, batch));                                     \
  }                                                                                                                \
  FACTORIZES(name##d) FACTORIZES(name##j) FACTORIZES(name##jBatched)
SYMMETRIC(Ssyev) SYMMETRIC(Dsyev) SYMMETRIC(Cheev) SYMMETRIC(Zheev)

// ---- Functions of any type, with sizes of 64 bits, which count in bytes ----

constexpr int kComplex = 4, kComplexDouble = 5;  // cudaDataType_t; 0 is single precision, 1 is double
static int64_t element_bytes(int type) { return type == 0 ? 4 : type == kComplexDouble ? 16 : 8; }
static bool is_complex(int type) { return type == kComplex || type == kComplexDouble; }
static int count_bytes(size_t* bytes, size_t* host_bytes, int64_t found, int64_t found_on_host = 0) {
  return *bytes = (size_t)found, *host_bytes = (size_t)found_on_host, kSuccess;
}

API int cusolverDnXgetrf_bufferSize(Solver*, void*, int64_t m, int64_t n, int type, void*, int64_t, int, size_t* bytes,
                                    size_t* host_bytes) {
  return count_bytes(bytes, host_bytes, sizes::lu_bytes(m, n, element_bytes(type)));
}
API int cusolverDnXgeqrf_bufferSize(Solver*, void*, int64_t, int64_t n, int type, void*, int64_t, int, void*, int,
                                    size_t* bytes, size_t* host_bytes) {
  return count_bytes(bytes, host_bytes, element_bytes(type) * sizes::qr(n) + 128);
}
API int cusolverDnXpotrf_bufferSize(Solver*, void*, int, int64_t n, int, void*, int64_t, int, size_t* bytes,
                                    size_t* host_bytes) {
  return count_bytes(bytes, host_bytes, sizes::cholesky_bytes(n));
}
API int cusolverDnXsyevBatched_bufferSize(Solver*, void*, int, int, int64_t n, int type, void*, int64_t, int, void*, int,
                                          size_t* bytes, size_t* host_bytes, int64_t batch) {
  return count_bytes(bytes, host_bytes, element_bytes(type) * sizes::symmetric_eigenvalues(n, batch) + 128);
}
API int cusolverDnXsyevd_bufferSize(Solver*, void*, int, int, int64_t n, int type, void*, int64_t, int, void*, int,
                                    size_t* bytes, size_t* host_bytes) {
  return count_bytes(bytes, host_bytes, element_bytes(type) * sizes::symmetric_eigenvalues(n, 1) + 128);
}
API int cusolverDnXgeev_bufferSize(Solver*, void*, int, int vectors, int64_t n, int type, void*, int64_t, int, void*, int,
                                   void*, int64_t, int, void*, int64_t, int, size_t* bytes, size_t* host_bytes) {
  int64_t each = element_bytes(type);
  int64_t on_host = each * sizes::host_elements_of_eigenvalues(n, each, is_complex(type), vectors);
  return count_bytes(bytes, host_bytes, sizes::eigenvalues_bytes(n, each, is_complex(type)), on_host);
}
FACTORIZES(Xgetrf) FACTORIZES(Xgeqrf) FACTORIZES(Xpotrf) FACTORIZES(Xpotrs)
FACTORIZES(XsyevBatched) FACTORIZES(Xsyevd) FACTORIZES(Xgeev)

// ---- What is not known: the first function that torch calls for each is refused ----

RAISED(cusolverDnXsytrs_bufferSize)
RAISED(cusolverDnSgesvdaStridedBatched_bufferSize) RAISED(cusolverDnDgesvdaStridedBatched_bufferSize)
RAISED(cusolverDnCgesvdaStridedBatched_bufferSize) RAISED(cusolverDnZgesvdaStridedBatched_bufferSize)
