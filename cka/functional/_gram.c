/* Gram matrix of float32 rows, shifted by the mean of the first rows.

   Both factors of the product are the same rows, in which columns are contiguous. A block of
   columns is therefore shifted and copied into the cache once, and pairs of rows are multiplied and
   summed along its columns. This needs no packing and no transposing, and only the pairs on one side
   of the diagonal. Each pair's sum over a block is added to a sum in float64.

   The blocks are divided among at most LANES lanes. Each lane has its own copy of a block and its own
   sums; the sums of the lanes are added at the end. The lanes depend on the number of columns only,
   so neither the result nor the working space depends on the number of threads. If there are more
   threads than lanes, the others are helpers: they take some of the pairs of a lane's block. A lane
   never waits for a helper to begin, because it may have no processor, only for one to end.

   The file includes itself once for each vector width. */

#if !defined(FLOATS)

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)

#include <immintrin.h>
#include <sched.h>

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
  LANES = 2,            /* most lanes */
  SHARE = 64,           /* a share of a panel's pairs is one SHARE-th of the rows on its right */
  SPINS = 2000,         /* checks for work or for an end before a thread gives up */
};

/* A lane's current block, for its helpers. Lanes are in different cache lines. */
typedef struct {
  _Alignas(64) uint64_t next; /* block in the upper half, next share of it in the lower half */
  uint64_t ended;             /* shares of the block that have been multiplied */
} Lane;

#define NO_BLOCK ((uint64_t)UINT32_MAX << 32)

typedef struct {
  const float *rows;
  int64_t samples, columns, stride, samples_for_centre;
  double *sums;
  float *blocks;
  Lane lanes[LANES];
} Work;

/* Position of row j of a lane's sums, which has the pairs (i, j) with i <= j. Tiles on the diagonal
   reach past it: their first i is below j + MOST_WIDE, and they have HIGH of them. */
static int64_t row_of_sums(int64_t j) {
  return j * (j - 1) / 2 + j * (MOST_WIDE + HIGH - 1);
}
static int64_t sums_of_lane(int64_t samples) {
  return (row_of_sums(samples + MOST_WIDE) + 7) / 8 * 8; /* whole cache lines */
}
static int64_t floats_of_lane(int64_t samples) { return (samples + MOST_WIDE) * PITCH; }

static int64_t blocks_in(int64_t columns) {
  return columns <= COLUMNS ? 1 : (columns + COLUMNS - 1) / COLUMNS;
}

static int64_t lanes_for(int64_t columns) {
  return blocks_in(columns) < LANES ? blocks_in(columns) : LANES;
}

/* Largest number of rows on the right side of a share, a multiple of `wide`. */
static int64_t rows_of_share(int64_t samples, int64_t wide) {
  return (samples / SHARE > 1 ? samples / SHARE : 1) * wide;
}

static int64_t shares_of_panel(int64_t samples, int64_t panel, int64_t wide) {
  const int64_t rows = rows_of_share(samples, wide);
  return (samples - panel + rows - 1) / rows;
}

/* Largest number of threads that have enough work in a block: a panel of rows each. */
int64_t cka_most_threads(int64_t samples, int64_t columns) {
  return lanes_for(columns) * (samples < 2 * PANEL ? 1 : samples / PANEL);
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

/* Bytes of working space. */
int64_t cka_space_bytes(int64_t samples, int64_t columns) {
  return lanes_for(columns) *
         (sums_of_lane(samples) * sizeof(double) + floats_of_lane(samples) * sizeof(float));
}

/* Write the (samples, samples) matrix to `gram`. `rows` are `stride` floats apart; `space` has
   cka_space_bytes(samples, columns) bytes and is aligned for doubles. */
void cka_gram(const float *rows, int64_t samples, int64_t columns, int64_t stride,
              int64_t samples_for_centre, int vector_floats, unsigned threads, void *space,
              float *gram) {
  double *sums = space;
  const int64_t lanes = lanes_for(columns), each = sums_of_lane(samples);
  Work work = {rows, samples, columns, stride, samples_for_centre,
               sums, (float *)(sums + lanes * each), {{NO_BLOCK, 0}, {NO_BLOCK, 0}}};
  GOMP_parallel(vector_floats == 16 ? add_blocks_avx512 : add_blocks_avx2, &work, threads, 0);
  for (int64_t panel = 0; panel < samples; panel += PANEL) /* in panels: fewer cache misses */
    for (int64_t j = panel; j < samples; j++)
      for (int64_t i = panel; i <= j && i < panel + PANEL; i++) {
        double sum = 0;
        for (int64_t lane = 0; lane < lanes; lane++)
          sum += sums[lane * each + row_of_sums(j) + i];
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

/* Add the products of some pairs of rows of a block to their sums: those of the panel of rows that
   starts at `panel` with the rows from `first` to `last`. `columns` is a multiple of FLOATS.
   Meanwhile `ahead`, rows of the next block, are prefetched: one row during each tile. */
TARGET static void NAMED(add_products)(const Work *work, const float *block, int64_t columns,
                                       double *sums, int64_t panel, int64_t first, int64_t last,
                                       const float **ahead, const float *ahead_end) {
  const int64_t samples = work->samples;
  for (int64_t j = first; j < last; j += WIDE)
    for (int64_t i = panel; i < panel + PANEL && i < samples && i < j + WIDE; i += HIGH) {
      const float *left = block + i * PITCH, *right = block + j * PITCH;
      const float *next = left;
      if (*ahead < ahead_end) {
        next = *ahead;
        *ahead += work->stride;
      }
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
                          sums + row_of_sums(j + t) + i);
    }
}

/* Fill `block` with `columns` columns of all rows at `rows`, shifted, and zeros up to `padded`. */
TARGET static void NAMED(shift)(const Work *work, const float *rows, int64_t columns,
                                int64_t padded, float *block) {
  float centre[COLUMNS];
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

/* Width of block `at`: a multiple of FLOATS. */
static int64_t NAMED(padded)(const Work *work, int64_t at, int64_t *columns) {
  const int64_t left = work->columns - at * COLUMNS;
  *columns = left < COLUMNS ? left : COLUMNS;
  return (*columns + FLOATS - 1) / FLOATS * FLOATS;
}

/* Take one share of a lane's current block and multiply its pairs. Returns 0 if there is none. */
TARGET static int NAMED(add_share)(const Work *work, Lane *lane, const float *block, double *sums,
                                   const float **ahead, const float *ahead_end) {
  const int64_t samples = work->samples;
  uint64_t taken = __atomic_load_n(&lane->next, __ATOMIC_ACQUIRE);
  for (;;) {
    int64_t share = (uint32_t)taken, panel = 0;
    if (taken >= NO_BLOCK) return 0;
    for (; panel < samples && share >= shares_of_panel(samples, panel, WIDE); panel += PANEL)
      share -= shares_of_panel(samples, panel, WIDE);
    if (panel >= samples) return 0;
    if (!__atomic_compare_exchange_n(&lane->next, &taken, taken + 1, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
      continue;
    const int64_t rows = rows_of_share(samples, WIDE), first = panel + share * rows;
    int64_t columns;
    const int64_t padded = NAMED(padded)(work, (int64_t)(taken >> 32), &columns);
    NAMED(add_products)(work, block, padded, sums, panel, first,
                        first + rows < samples ? first + rows : samples, ahead, ahead_end);
    __atomic_add_fetch(&lane->ended, 1, __ATOMIC_ACQ_REL);
    return 1;
  }
}

/* Add the products of one lane's blocks to its sums. */
TARGET static void NAMED(add_lane)(Work *work, int64_t number, int has_helpers) {
  const int64_t samples = work->samples;
  Lane *lane = work->lanes + number;
  double *sums = work->sums + number * sums_of_lane(samples);
  float *block = work->blocks + number * floats_of_lane(samples);
  uint64_t shares = 0;
  for (int64_t at = 0; at < sums_of_lane(samples); at++) sums[at] = 0;
  for (int64_t at = 0; at < MOST_WIDE * PITCH; at++) block[samples * PITCH + at] = 0;
  for (int64_t panel = 0; panel < samples; panel += PANEL)
    shares += (uint64_t)shares_of_panel(samples, panel, WIDE);
  const int64_t all = blocks_in(work->columns), lanes = lanes_for(work->columns);
  const int64_t last = all * (number + 1) / lanes;
  for (int64_t at = all * number / lanes; at < last; at++) {
    const float *rows = work->rows + at * COLUMNS;
    const float *ahead = rows + COLUMNS;
    const float *ahead_end = at + 1 < last ? ahead + samples * work->stride : ahead;
    int64_t columns;
    const int64_t padded = NAMED(padded)(work, at, &columns);
    NAMED(shift)(work, rows, columns, padded, block);
    if (!has_helpers) {
      for (int64_t panel = 0; panel < samples; panel += PANEL)
        NAMED(add_products)(work, block, padded, sums, panel, panel, samples, &ahead, ahead_end);
      continue;
    }
    __atomic_store_n(&lane->ended, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&lane->next, (uint64_t)at << 32, __ATOMIC_RELEASE);
    while (NAMED(add_share)(work, lane, block, sums, &ahead, ahead_end)) {
    }
    int spins = 0;
    while (__atomic_load_n(&lane->ended, __ATOMIC_ACQUIRE) < shares)
      if (spins < SPINS) {
        spins++;
        _mm_pause();
      } else {
        sched_yield();
      }
  }
  __atomic_store_n(&lane->next, UINT64_MAX, __ATOMIC_RELEASE);
}

/* Help a lane until it ends, or until it has had no work for some time. */
TARGET static void NAMED(help_lane)(Work *work, int64_t number) {
  Lane *lane = work->lanes + number;
  double *sums = work->sums + number * sums_of_lane(work->samples);
  const float *block = work->blocks + number * floats_of_lane(work->samples), *none = block;
  for (int spins = 0; spins < SPINS; spins++)
    if (NAMED(add_share)(work, lane, block, sums, &none, none))
      spins = 0;
    else if (__atomic_load_n(&lane->next, __ATOMIC_ACQUIRE) == UINT64_MAX)
      return;
    else
      _mm_pause();
}

/* Run one thread's part: whole lanes, or as a helper of a lane. */
TARGET static void NAMED(add_blocks)(void *data) {
  Work *work = data;
  const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  const int64_t lanes = lanes_for(work->columns);
  for (int64_t number = thread; number < lanes; number += threads)
    NAMED(add_lane)(work, number, threads > lanes + number);
  if (thread >= lanes) NAMED(help_lane)(work, thread % lanes);
}

#endif
