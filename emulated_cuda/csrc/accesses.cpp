// Loads, stores and atomic operations of kernels that Python computes, one call for many elements.
//
// Each takes the addresses of the elements and, or null, a byte for each that is 0 if it is not touched.
// Each returns -1, or the index of the first element that a card would refuse.
#include "accesses.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "half.hpp"

namespace {
constexpr int64_t kNone = -1;
constexpr int64_t kAtOnce = 256;  // so many addresses are checked before the first element is touched

template <class Touch>
int64_t each(const int64_t* addresses, const uint8_t* mask, int64_t count, size_t size, Touch touch) {
  Checked checked;
  for (int64_t i = 0; i < count;) {
    const int64_t end = std::min(count, i + kAtOnce);
    if (!mask && checked.allows_all(addresses + i, end - i, size)) {
      for (; i < end; ++i) touch(i, (char*)addresses[i]);
      continue;
    }
    for (; i < end; ++i) {
      if (mask && !mask[i]) continue;
      if (!checked.allows((uintptr_t)addresses[i], size)) return i;
      touch(i, (char*)addresses[i]);
    }
  }
  return kNone;
}

template <class T>
int64_t load(T* to, const int64_t* addresses, const uint8_t* mask, int64_t count) {
  return each(addresses, mask, count, sizeof(T), [&](int64_t i, const char* from) { memcpy(to + i, from, sizeof(T)); });
}
template <class T>
int64_t store(const T* from, const int64_t* addresses, const uint8_t* mask, int64_t count) {
  return each(addresses, mask, count, sizeof(T), [&](int64_t i, char* to) { memcpy(to, from + i, sizeof(T)); });
}

// The numbers of `_KINDS` in triton/descriptors.py.
enum Kind : int { kAdd, kMax, kMin, kAnd, kOr, kXor, kExchange };

template <class W>
W combine_numbers(int kind, W before, W given) {
  switch (kind) {
    case kAdd: return before + given;
    case kMax: return given > before ? given : before;
    case kMin: return given < before ? given : before;
    default: return given;
  }
}
template <class T>
T combine(int kind, T before, T given) {
  if constexpr (std::is_integral_v<T>) {
    switch (kind) {
      case kAdd: return (T)((std::make_unsigned_t<T>)before + (std::make_unsigned_t<T>)given);
      case kAnd: return before & given;
      case kOr: return before | given;
      case kXor: return before ^ given;
      default: return combine_numbers(kind, before, given);
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    return combine_numbers(kind, before, given);
  } else {
    return narrow<T>(combine_numbers(kind, wide(before), wide(given)));
  }
}
template <class T>
int64_t atomic(int kind, const int64_t* addresses, const uint8_t* mask, const void* given, void* before, int64_t count) {
  return each(addresses, mask, count, sizeof(T), [&](int64_t i, char* at) {
    T old;
    memcpy(&old, at, sizeof old);
    ((T*)before)[i] = old;
    T now = combine(kind, old, ((const T*)given)[i]);
    memcpy(at, &now, sizeof now);
  });
}
}  // namespace

API int64_t emulated_load(void* to, const int64_t* addresses, const uint8_t* mask, int64_t count, int size) {
  BY_SIZE(load((T*)to, addresses, mask, count))
}
API int64_t emulated_store(const void* from, const int64_t* addresses, const uint8_t* mask, int64_t count, int size) {
  BY_SIZE(store((const T*)from, addresses, mask, count))
}
// `type` is a letter: of Python's struct module, or b for bfloat16. `before` gets what was there.
API int64_t emulated_atomic(int kind, char type, const int64_t* addresses, const uint8_t* mask, const void* given, void* before,
                            int64_t count) {
  switch (type) {
    case 'f': return atomic<float>(kind, addresses, mask, given, before, count);
    case 'd': return atomic<double>(kind, addresses, mask, given, before, count);
    case 'e': return atomic<Half>(kind, addresses, mask, given, before, count);
    case 'b': return atomic<Bfloat>(kind, addresses, mask, given, before, count);
    case 'h': return atomic<int16_t>(kind, addresses, mask, given, before, count);
    case 'H': return atomic<uint16_t>(kind, addresses, mask, given, before, count);
    case 'i': return atomic<int32_t>(kind, addresses, mask, given, before, count);
    case 'I': return atomic<uint32_t>(kind, addresses, mask, given, before, count);
    case 'q': return atomic<int64_t>(kind, addresses, mask, given, before, count);
    default: return atomic<uint64_t>(kind, addresses, mask, given, before, count);
  }
}
template <class T>
static int64_t swap(const int64_t* addresses, const uint8_t* mask, const T* expected, const T* given, T* before,
                    int64_t count) {
  return each(addresses, mask, count, sizeof(T), [&](int64_t i, char* at) {
    memcpy(before + i, at, sizeof(T));
    if (before[i] == expected[i]) memcpy(at, given + i, sizeof(T));
  });
}
// Stores what is given if what is there is what is expected, bit by bit.
API int64_t emulated_compare_and_swap(const int64_t* addresses, const uint8_t* mask, const void* expected, const void* given,
                                      void* before, int64_t count, int size) {
  BY_SIZE(swap(addresses, mask, (const T*)expected, (const T*)given, (T*)before, count))
}
