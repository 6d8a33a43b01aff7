// What kernels that Python computes may touch.
#pragma once

#include "emulated.hpp"

#include <tuple>
#include <utility>

// In memory.cpp: the allocation of a device, or the pinned block of the host, in which an address lies.
std::pair<uintptr_t, uintptr_t> accessible_around(uintptr_t address);

// Whether elements may be touched. It remembers the last allocation, because most are in the same.
class Checked {
 public:
  bool allows(uintptr_t address, size_t size) {
    if (address >= first_ && address + size <= last_) return address % size == 0;
    std::tie(first_, last_) = accessible_around(address);
    return address >= first_ && address + size <= last_ && address % size == 0;
  }
  // Whether all elements lie in the last allocation, without a branch for each.
  bool allows_all(const int64_t* addresses, int64_t count, size_t size) const {
    if (last_ - first_ < size) return false;
    const uintptr_t farthest = last_ - first_ - size;
    uintptr_t low_bits = 0, largest = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uintptr_t distance = (uintptr_t)addresses[i] - first_;
      low_bits |= (uintptr_t)addresses[i];
      largest = distance > largest ? distance : largest;
    }
    return largest <= farthest && low_bits % size == 0;
  }
  // Whether all bytes from one address to another may be touched.
  bool holds(__int128 low, __int128 high) {
    if (low >= first_ && high <= last_) return true;
    if (low < 0 || high > UINTPTR_MAX) return false;
    std::tie(first_, last_) = accessible_around((uintptr_t)low);
    return low >= first_ && high <= last_;
  }

 private:
  uintptr_t first_ = 0, last_ = 0;
};

#define BY_SIZE(call)                           \
  switch (size) {                               \
    case 1: { using T = uint8_t; return call; } \
    case 2: { using T = uint16_t; return call; } \
    case 4: { using T = uint32_t; return call; } \
    default: { using T = uint64_t; return call; } \
  }
