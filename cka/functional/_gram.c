/* Gram matrix of float32 rows, shifted by the mean of the first rows.

   Both factors of the product are the same rows, in which columns are contiguous. A block of
   columns is therefore shifted and copied into the cache once, and pairs of rows are multiplied and
   summed along its columns. This needs no packing and no transposing, and only the pairs on one side
   of the diagonal. Each pair's sum over a block is added to a sum in float64.

   The file includes itself once for each vector width. */

#if !defined(FLOATS)

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)

#include <immintrin.h>

/* Functions of the OpenMP library that torch has loaded, so that its threads are used. */
extern void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags);
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

enum {
  COLUMNS = 256,        /* columns of a block */
  PITCH = COLUMNS + 16, /* rows a power of two apart would compete for the same cache lines */
  PANEL = 16,           /* rows of a block that stay in a level-1 cache */
  HIGH = 4,             /* rows on the left side of a tile */
  MOST_WIDE = 6,        /* most rows on its right side, and rows of zeros after the last row */
};

typedef struct {
  const float *rows;
  int64_t samples, columns, stride, samples_for_centre;
  double *sums;
  float *blocks;
  int64_t threads; /* actual number of threads: OpenMP may start fewer than requested */
} Work;

/* Sums of a thread. Rows are longer than the number of samples because the last tiles reach past
   the last sample. */
static int64_t row_of_sums(int64_t samples) { return samples + HIGH; }
static int64_t sums_of_thread(int64_t samples) {
  return (samples + MOST_WIDE) * row_of_sums(samples);
}
static int64_t floats_of_thread(int64_t samples) { return (samples + MOST_WIDE + 1) * PITCH; }

/* Largest number of threads that have work to do: one for each block. */
int64_t cka_most_threads(int64_t columns) {
  return columns <= COLUMNS ? 1 : (columns + COLUMNS - 1) / COLUMNS;
}

#define FLOATS 16
#define WIDE 6
#define TARGET __attribute__((target("avx512f")))
#define NAMED(name) name##_avx512
#define SIMD(name) _mm512_##name
#define VECTOR __m512
#include "_gram.c"
#undef FLOATS
#undef WIDE
#undef TARGET
#undef NAMED
#undef SIMD
#undef VECTOR

#define FLOATS 8
#define WIDE 2
#define TARGET __attribute__((target("avx2,fma")))
#define NAMED(name) name##_avx2
#define SIMD(name) _mm256_##name
#define VECTOR __m256
#include "_gram.c"

/* Width in floats of the widest vectors that this processor supports; 0 if it supports none. */
int cka_vector_floats(void) {
  if (__builtin_cpu_supports("avx512f")) return 16;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 8 : 0;
}

/* Bytes of working space that each thread needs. */
int64_t cka_space(int64_t samples) {
  return sums_of_thread(samples) * sizeof(double) + floats_of_thread(samples) * sizeof(float);
}

/* Write the (samples, samples) matrix to `gram`. `rows` are `stride` floats apart; `space` has
   `threads` times cka_space(samples) bytes and is aligned for doubles. */
void cka_gram(const float *rows, int64_t samples, int64_t columns, int64_t stride,
              int64_t samples_for_centre, int vector_floats, unsigned threads, void *space,
              float *gram) {
  double *sums = space;
  const int64_t each = sums_of_thread(samples);
  Work work = {rows, samples, columns, stride, samples_for_centre,
               sums, (float *)(sums + threads * each), 0};
  GOMP_parallel(vector_floats == 16 ? add_blocks_avx512 : add_blocks_avx2, &work, threads, 0);
  for (int64_t panel = 0; panel < samples; panel += PANEL) /* in panels: fewer cache misses */
    for (int64_t j = panel; j < samples; j++)
      for (int64_t i = panel; i <= j && i < panel + PANEL; i++) {
        double sum = 0;
        for (int64_t thread = 0; thread < work.threads; thread++)
          sum += sums[thread * each + j * row_of_sums(samples) + i];
        gram[i * samples + j] = gram[j * samples + i] = (float)sum;
      }
}

#else

int cka_vector_floats(void) { return 0; }

#endif
#else

/* Add the sums of four vectors to four numbers at `to`. */
TARGET static inline __attribute__((always_inline)) void NAMED(add_totals)(
    VECTOR a, VECTOR b, VECTOR c, VECTOR d, double *to) {
  const VECTOR ab = SIMD(add_ps)(SIMD(unpacklo_ps)(a, b), SIMD(unpackhi_ps)(a, b));
  const VECTOR cd = SIMD(add_ps)(SIMD(unpacklo_ps)(c, d), SIMD(unpackhi_ps)(c, d));
  const VECTOR abcd = SIMD(add_ps)(SIMD(shuffle_ps)(ab, cd, 0x44), SIMD(shuffle_ps)(ab, cd, 0xee));
#if FLOATS == 16
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), upper);
#else
  const __m256 half = abcd;
#endif
  const __m128 totals = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), _mm256_cvtps_pd(totals)));
}

/* Add the products of all pairs of rows of a block to their sums. `columns` is a multiple of FLOATS.
   Meanwhile the rows at `ahead`, the next block, are prefetched: one row during each tile. */
TARGET static void NAMED(add_products)(const float *block, int64_t samples, int64_t columns,
                                       double *sums, const float *ahead, int64_t stride) {
  int64_t fetched = 0;
  for (int64_t panel = 0; panel < samples; panel += PANEL)
    for (int64_t j = panel; j < samples; j += WIDE)
      for (int64_t i = panel; i < panel + PANEL && i < samples && i < j + WIDE; i += HIGH) {
        const float *left = block + i * PITCH, *right = block + j * PITCH;
        const float *next = fetched < samples ? ahead + fetched++ * stride : left;
        VECTOR products[WIDE][HIGH];
#pragma GCC unroll 6
        for (int t = 0; t < WIDE; t++)
#pragma GCC unroll 4
          for (int s = 0; s < HIGH; s++) products[t][s] = SIMD(setzero_ps)();
        for (int64_t column = 0; column < columns; column += FLOATS) {
          VECTOR lefts[HIGH];
          _mm_prefetch((const char *)(next + column), _MM_HINT_T1);
#pragma GCC unroll 4
          for (int s = 0; s < HIGH; s++) lefts[s] = SIMD(loadu_ps)(left + s * PITCH + column);
#pragma GCC unroll 6
          for (int t = 0; t < WIDE; t++) {
            const VECTOR one = SIMD(loadu_ps)(right + t * PITCH + column);
#pragma GCC unroll 4
            for (int s = 0; s < HIGH; s++)
              products[t][s] = SIMD(fmadd_ps)(lefts[s], one, products[t][s]);
          }
        }
#pragma GCC unroll 6
        for (int t = 0; t < WIDE; t++)
          NAMED(add_totals)(products[t][0], products[t][1], products[t][2], products[t][3],
                            sums + (j + t) * row_of_sums(samples) + i);
      }
}

/* Fill `block` with `columns` columns of all rows at `rows`, shifted, and zeros up to `padded`. */
TARGET static void NAMED(shift)(const Work *work, const float *rows, int64_t columns,
                                int64_t padded, float *block, float *centre) {
  for (int64_t column = 0; column < columns; column++) centre[column] = 0;
  for (int64_t sample = 0; sample < work->samples_for_centre; sample++)
    for (int64_t column = 0; column < columns; column++)
      centre[column] += rows[sample * work->stride + column];
  for (int64_t column = 0; column < columns; column++)
    centre[column] /= (float)work->samples_for_centre;
  for (int64_t sample = 0; sample < work->samples; sample++, block += PITCH) {
    for (int64_t column = 0; column < columns; column++)
      block[column] = rows[sample * work->stride + column] - centre[column];
    for (int64_t column = columns; column < padded; column++) block[column] = 0;
  }
}

/* Add the products of one thread's blocks to its sums. */
TARGET static void NAMED(add_blocks)(void *data) {
  Work *work = data;
  const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  if (thread == 0) work->threads = threads;
  double *sums = work->sums + thread * sums_of_thread(work->samples);
  float *block = work->blocks + thread * floats_of_thread(work->samples);
  float *zeros = block + work->samples * PITCH, *centre = zeros + MOST_WIDE * PITCH;
  for (int64_t at = 0; at < sums_of_thread(work->samples); at++) sums[at] = 0;
  for (int64_t at = 0; at < MOST_WIDE * PITCH; at++) zeros[at] = 0;
  const int64_t all = cka_most_threads(work->columns);
  const int64_t last = all * (thread + 1) / threads;
  for (int64_t at = all * thread / threads; at < last; at++) {
    const int64_t left = work->columns - at * COLUMNS;
    const int64_t columns = left < COLUMNS ? left : COLUMNS;
    const int64_t padded = (columns + FLOATS - 1) / FLOATS * FLOATS;
    const float *rows = work->rows + at * COLUMNS;
    NAMED(shift)(work, rows, columns, padded, block, centre);
    NAMED(add_products)(block, work->samples, padded, sums, at + 1 < last ? rows + COLUMNS : rows,
                        work->stride);
  }
}

#endif
