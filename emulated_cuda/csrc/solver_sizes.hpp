// How large the workspaces of cuSOLVER's functions are. The rules were fitted to what the library of CUDA 13.0 answered
// on an H200 (132 multiprocessors, as on an H100): 104,120 answers of the functions below, for sizes up to 8,969, in
// benchmarks/results/card-h200/solvers.jsonl.gz. Each rule gives all of them exactly, except the bytes on the host of
// eigenvalues of general matrices, as host_elements_of_eigenvalues says. On other cards and versions they are the
// best known. Sizes are counted in elements of the matrix's type, unless a name says bytes.
#pragma once

#include "emulated.hpp"

#include <algorithm>

namespace sizes {

inline int64_t rounded(int64_t number) { return (int64_t)round_up((size_t)number, 32); }
inline int64_t blocks(int64_t number) { return (number + 31) / 32; }

// ---- LU, Cholesky and LDL ----

// LU, in bytes: the largest of what a panel needs, what a kernel for many rows needs, and a table of blocks. That kernel
// is used from somewhere between 1,501 and 1,588 rows on, and needs more from between 2,017 and 2,137 on.
inline int64_t lu_bytes(int64_t m, int64_t n, int64_t element_bytes) {
  constexpr int64_t kManyRows = 1537, kMoreRows = 2049;
  int64_t least = std::min(m, n), panel = 32;
  while (panel < std::min<int64_t>(least, 512)) panel *= 2;
  int64_t step = m < kMoreRows ? 1 : 2;
  int64_t rows = m < kManyRows ? 0 : 256 * (32 + step) * element_bytes + 2048 * step;
  return 128 + 8 * rounded(least) + std::max({8 * panel, rows, rounded(4 * blocks(m) * blocks(n))});
}

// Cholesky, in bytes: whatever the type is.
inline int64_t cholesky_bytes(int64_t n) { return 128 + rounded(4 * blocks(n) * blocks(n)); }

inline int64_t ldl(int64_t n, int64_t element_bytes) {
  int64_t least = element_bytes == 4 ? 24608 : element_bytes == 8 ? 13328 : 11016;
  return std::max(least, (n < 4096 ? 64 : 128) * n + 64);
}

// ---- QR ----

// It depends on the columns only.
inline int64_t qr(int64_t n) { return 1024 * std::max<int64_t>(n, 256) + 524288; }

// Q with `n` columns, from `k` reflectors, in blocks of 128.
inline int64_t q(int64_t m, int64_t n, int64_t k) {
  k = std::min<int64_t>(k, 128);
  return 16640 + std::max<int64_t>(16384, rounded(2 * k * n)) + rounded(k * m);
}

// A product of Q, of `k` reflectors, with a matrix on its right.
inline int64_t product_with_q(int64_t m, int64_t n, int64_t k) {
  int64_t most = std::max(m, n);
  return 65792 + 256 * m + 512 * n + rounded(k * (k + most)) + (most > 32 ? rounded(n) : 0);
}

// ---- Singular values ----

// By QR iterations, of a matrix that is not wider than high.
inline int64_t singular_values(int64_t m, int64_t n) {
  if (m == n) {
    return 65792 + 256 * n + rounded(2 * n * n) + rounded(n * n) + (n > 32 ? 4 : 3) * rounded(n);
  }
  int64_t of_square = 65792 + 256 * m + rounded((2 * m + n) * n) + rounded(m) + 2 * rounded(n) - 32;
  int64_t of_tall = qr(n) + std::max(q(m, m, n), q(m, n, n));
  return rounded(m * n) + 2 * rounded(n * n) + rounded(n) + 32 + std::max(of_square, of_tall);
}

// By Jacobi's method: QR first if the matrix is not square, of its transpose if it is wide. `is_thin`: without the
// columns that are orthogonal to all of the matrix.
inline int64_t jacobi_singular_values(int64_t m, int64_t n, bool is_thin) {
  int64_t least = std::min(m, n), most = std::max(m, n), count = blocks(least);
  int64_t iterations = 1024 + 2048 * count + rounded(2 * least * least) + rounded(least + 4 * count * count + count);
  if (m == n) return iterations;
  int64_t product = product_with_q(most, is_thin ? least : most, least);
  int64_t found = rounded(least) + std::max(qr(least) + 32, product);
  return m < n ? found + rounded(m * n) : std::max(found, iterations + least * least);
}
constexpr int64_t kJacobiSingularValuesOfBatch = 992;  // whatever the sizes are

// ---- Eigenvalues of symmetric matrices ----

// By divide and conquer, of a batch at once. More is needed to reduce large matrices to tridiagonal form.
inline int64_t symmetric_eigenvalues(int64_t n, int64_t batch) {
  int64_t k = n - 1, to_vectors = batch * (65792 + 256 * k + 512 * n) + rounded(batch * (n + k) * k);
  if (n > 32) to_vectors += rounded(batch * n);
  int64_t to_tridiagonal = batch * (32896 + 128 * n) + rounded(batch * (3 * n - 1) * k) + rounded(batch * n);
  return batch * (n * n + 2 * n + 3) + std::max(to_vectors, to_tridiagonal) + 32;
}

inline int64_t jacobi_eigenvalues(int64_t n) {
  if (n >= 4096) {
    int64_t count = (n + 2047) / 2048;
    return n * n + 4096 * (n + 2048) + 4 * count * count;
  }
  int64_t count = blocks(n);
  return n * n + n + 1024 * (count + 1) + 4 * count * count + count;
}
inline int64_t jacobi_eigenvalues_of_batch(int64_t n, int64_t batch) {
  int64_t count = blocks(n);
  return 1024 + 4 * count * count + batch * ((n + 1) * (n + 1) + 1024 * count);
}

// ---- Eigenvalues of general matrices ----

inline int64_t eigenvalues_bytes(int64_t n, int64_t element_bytes, bool is_complex) {
  int64_t vectors_bytes = n * (is_complex ? 3 * element_bytes + element_bytes / 2 : 4 * element_bytes);
  int64_t matrix = std::max(n * n, n > 1 ? q(n - 1, n - 1, n - 1) : 33024);
  return (int64_t)round_up((size_t)(element_bytes * (matrix + 32) + vectors_bytes), 512);
}

// On the host, where torch allocates it and nothing uses it here. A fit: wrong by 15 % at most for more than 64 rows, by
// 27 % for 19 to 64, and by 3 kB for fewer.
inline int64_t host_elements_of_eigenvalues(int64_t n, int64_t element_bytes, bool is_complex, bool with_vectors) {
  int64_t matrices = (with_vectors ? 2 : 1) * n * n;
  if (n <= 18) return matrices + n * n + 64;
  if (n > 1750) return matrices + (is_complex ? 516 : 520) * n + 524480;
  if (n >= (is_complex ? 310 : 580)) return matrices + n * n * 56 / 100;
  return matrices + 65536 / element_bytes + (is_complex ? 85 : 170) * n + n * n / 4;
}

}  // namespace sizes
