// Arithmetic on integers for which torch would need several operators of twice the size.
#include "emulated.hpp"

// -O2 leaves the loops below as they are.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

// The upper halves of products of 32 bits without sign: of each number with its own factor, or with the first one.
API void emulated_high_bits(const uint32_t* __restrict numbers, const uint32_t* __restrict factors,
                            uint32_t* __restrict found, int64_t count, int is_one_factor) {
  const uint64_t factor = *factors;
  if (is_one_factor) {
    for (int64_t i = 0; i < count; ++i) found[i] = (uint32_t)(numbers[i] * factor >> 32);
  } else {
    for (int64_t i = 0; i < count; ++i) found[i] = (uint32_t)((uint64_t)numbers[i] * factors[i] >> 32);
  }
}
