// cuSOLVER: factorizations that need no factor, and the sizes of their workspaces, which torch allocates. The
// library cannot be asked for them without a device. They are those that cuSOLVER of CUDA 13.0 asked for on an H100
// (torch 2.11.0): 997 calls in benchmarks/results/card-h100, with up to 1,500 rows, in single, double and single
// complex precision. On other cards and versions they are the best known. LU is a fit, as its function says; QR is
// exact for all shapes that were recorded, Cholesky for all but 1,500 rows. Other functions are refused.
#include "library_work.hpp"

#include <algorithm>

struct Solver {
  Stream stream;
};
constexpr int kExecutionFailed = 6;

static int factorize(Solver* solver, const char* name) {
  return give_library_work(solver->stream, name, "a function of cuSOLVER") ? kSuccess : kExecutionFailed;
}

// ---- Handles ----

API int cusolverDnCreate(Solver** solver) { return *solver = new Solver{}, kSuccess; }
API int cusolverDnDestroy(Solver* solver) { return delete solver, kSuccess; }
API int cusolverDnSetStream(Solver* solver, Stream stream) { return solver->stream = stream, kSuccess; }
API int cusolverDnCreateParams(void** parameters) { return *parameters = new char, kSuccess; }
API int cusolverDnDestroyParams(void* parameters) { return delete (char*)parameters, kSuccess; }

// ---- Workspaces ----

static int64_t rounded(int64_t number) { return (int64_t)round_up((size_t)number, 32); }

// LU, in bytes: whatever the type is. Of 17 sizes of square matrices 14 are exact: those up to 128, 256, 512, 700
// and 1,024. For 200, 400 and 1,500 it is 640, 1,024 and 4,768 bytes too small; others were not recorded.
static int64_t lu_bytes(int64_t m, int64_t n) {
  int64_t most = std::max(m, n), padded = 32;
  while (padded < std::min<int64_t>(most, 128)) padded *= 2;
  if (most <= 128) return 256 + 16 * padded;
  return most <= 512 ? 256 + rounded(16 * most) : 4352 + 4 * rounded(2 * most);
}

// QR, in elements, and 128 bytes: it depends on the columns only.
static int64_t qr_elements(int64_t n) { return 1024 * std::max<int64_t>(n, 256) + 524288; }

// Q of its reflectors, in elements: blocks of 128 columns; fewer columns are done at once.
static int64_t q_elements(int64_t m, int64_t n) {
  constexpr int64_t kAlways = 33024;
  if (n >= 128) return kAlways + 128 * (m + 2 * n - 128);
  return kAlways + rounded(m * n) + (n > 64 ? rounded((n - 64) * n) : 0);
}

// Cholesky, in bytes: whatever the type is. It is 160 bytes too large for 1,500 rows, exact for the 16 smaller sizes.
static int64_t cholesky_bytes(int64_t n) {
  int64_t blocks = (n + 63) / 64;
  return 128 + rounded(std::max<int64_t>(n * blocks / 4, 1));
}

// ---- Functions ----

#define OF_TYPE(letter, bytes)                                                                                      \
  API int cusolverDn##letter##getrf_bufferSize(Solver*, int m, int n, void*, int, int* size) {                      \
    return *size = (int)(lu_bytes(m, n) / bytes), kSuccess;                                                         \
  }                                                                                                                 \
  API int cusolverDn##letter##geqrf_bufferSize(Solver*, int, int n, void*, int, int* size) {                        \
    return *size = (int)qr_elements(n), kSuccess;                                                                   \
  }                                                                                                                 \
  API int cusolverDn##letter##potrf_bufferSize(Solver*, int, int n, void*, int, int* size) {                        \
    return *size = (int)(cholesky_bytes(n) / bytes), kSuccess;                                                      \
  }                                                                                                                 \
  API int cusolverDn##letter##getrf(Solver* solver) { return factorize(solver, "cusolverDn" #letter "getrf"); }     \
  API int cusolverDn##letter##getrs(Solver* solver) { return factorize(solver, "cusolverDn" #letter "getrs"); }     \
  API int cusolverDn##letter##geqrf(Solver* solver) { return factorize(solver, "cusolverDn" #letter "geqrf"); }     \
  API int cusolverDn##letter##potrf(Solver* solver) { return factorize(solver, "cusolverDn" #letter "potrf"); }     \
  API int cusolverDn##letter##potrs(Solver* solver) { return factorize(solver, "cusolverDn" #letter "potrs"); }     \
  API int cusolverDn##letter##potrfBatched(Solver* solver) {                                                        \
    return factorize(solver, "cusolverDn" #letter "potrfBatched");                                                  \
  }                                                                                                                 \
  API int cusolverDn##letter##potrsBatched(Solver* solver) {                                                        \
    return factorize(solver, "cusolverDn" #letter "potrsBatched");                                                  \
  }
OF_TYPE(S, 4) OF_TYPE(D, 8) OF_TYPE(C, 8) OF_TYPE(Z, 16)

#define Q_OF_REFLECTORS(name)                                                                                  \
  API int cusolverDn##name##_bufferSize(Solver*, int m, int n, int, void*, int, void*, int* size) {            \
    return *size = (int)q_elements(m, n), kSuccess;                                                            \
  }                                                                                                            \
  API int cusolverDn##name(Solver* solver) { return factorize(solver, "cusolverDn" #name); }
Q_OF_REFLECTORS(Sorgqr) Q_OF_REFLECTORS(Dorgqr) Q_OF_REFLECTORS(Cungqr) Q_OF_REFLECTORS(Zungqr)

// The same of any type, with sizes of 64 bits, in bytes; nothing is asked for on the host.
static int64_t element_bytes(int type) {  // cudaDataType_t: float, double, and both complex
  return type == 0 ? 4 : type == 5 ? 16 : 8;
}
API int cusolverDnXgeqrf_bufferSize(Solver*, void*, int64_t, int64_t n, int type, void*, int64_t, int, void*, int,
                                    size_t* bytes, size_t* host_bytes) {
  return *bytes = (size_t)(element_bytes(type) * qr_elements(n) + 128), *host_bytes = 0, kSuccess;
}
API int cusolverDnXpotrf_bufferSize(Solver*, void*, int, int64_t n, int, void*, int64_t, int, size_t* bytes,
                                    size_t* host_bytes) {
  return *bytes = (size_t)cholesky_bytes(n), *host_bytes = 0, kSuccess;
}
API int cusolverDnXgeqrf(Solver* solver) { return factorize(solver, "cusolverDnXgeqrf"); }
API int cusolverDnXpotrf(Solver* solver) { return factorize(solver, "cusolverDnXpotrf"); }
API int cusolverDnXpotrs(Solver* solver) { return factorize(solver, "cusolverDnXpotrs"); }

// ---- What is not known: the first function that torch calls for each is refused ----

constexpr const char* kAdvice =
    "The workspaces of this function are not known without a GPU: compute this on the CPU (tensor.cpu()), or measure "
    "on a GPU.";
RAISED(cusolverDnCreateGesvdjInfo) RAISED(cusolverDnCreateSyevjInfo)
RAISED(cusolverDnXgeev_bufferSize) RAISED(cusolverDnXsyevBatched_bufferSize) RAISED(cusolverDnXsyevd_bufferSize)
RAISED(cusolverDnXsytrs_bufferSize)
#define NOT_KNOWN(letter)                                                                    \
  RAISED(cusolverDn##letter##gesvd_bufferSize) RAISED(cusolverDn##letter##sytrf_bufferSize)  \
  RAISED(cusolverDn##letter##gesvdaStridedBatched_bufferSize)                                \
  RAISED(cusolverDn##letter##gesvdj_bufferSize) RAISED(cusolverDn##letter##gesvdjBatched_bufferSize)
NOT_KNOWN(S) NOT_KNOWN(D) NOT_KNOWN(C) NOT_KNOWN(Z)
RAISED(cusolverDnSsyevd_bufferSize) RAISED(cusolverDnDsyevd_bufferSize)
RAISED(cusolverDnCheevd_bufferSize) RAISED(cusolverDnZheevd_bufferSize)
RAISED(cusolverDnSsyevj_bufferSize) RAISED(cusolverDnDsyevj_bufferSize)
RAISED(cusolverDnCheevj_bufferSize) RAISED(cusolverDnZheevj_bufferSize)
RAISED(cusolverDnSsyevjBatched_bufferSize) RAISED(cusolverDnDsyevjBatched_bufferSize)
RAISED(cusolverDnCheevjBatched_bufferSize) RAISED(cusolverDnZheevjBatched_bufferSize)
RAISED(cusolverDnSormqr_bufferSize) RAISED(cusolverDnDormqr_bufferSize)
RAISED(cusolverDnCunmqr_bufferSize) RAISED(cusolverDnZunmqr_bufferSize)
