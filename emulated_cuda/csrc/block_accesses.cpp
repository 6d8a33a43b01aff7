// Loads and stores of whole blocks by Triton kernels.
//
// In every dimension of a block, the addresses of each program are an arithmetic progression.
//
// A block that lies in one allocation as a whole is checked once for each program; in others, each element is
// checked. Elements are touched in the order of programs and dimensions, as in accesses.cpp.
#include "accesses.hpp"

#include <cstring>

namespace {
constexpr int kMostDims = 16;

// `Block` in triton/memory.py. Steps are in bytes.
struct Block {
  const int64_t* bases;  // the address of each program's first element
  int64_t programs, base_step;  // base_step is 0 if all programs have the first base, else 1
  const uint8_t* active;  // for each program, or null for all
  const uint8_t* mask;  // for each element, or null for all
  int64_t mask_step;  // from the mask of one program to that of the next
  const int64_t *lengths, *steps;
  int32_t dims, size;
};

// The dimensions of a block; those that follow each other without a gap are one.
struct Dims {
  explicit Dims(const Block& block) {
    for (int i = 0; i < block.dims; ++i) {
      int64_t length = block.lengths[i], step = block.steps[i];
      if (length == 1) continue;
      total *= length;
      (step < 0 ? low : high) += (__int128)step * (length - 1);
      is_aligned = is_aligned && step % block.size == 0;
      if (outer >= 0 && steps[outer] == (__int128)step * length) {
        lengths[outer] *= length;
        steps[outer] = step;
      } else {
        ++outer;
        lengths[outer] = length;
        steps[outer] = step;
      }
    }
    if (outer < 0) outer = 0;
    high += block.size;
  }
  int outer = -1;  // how many are around the last
  int64_t lengths[kMostDims] = {1}, steps[kMostDims] = {0}, total = 1;
  __int128 low = 0, high = 0;  // the bytes that a block touches, from its base
  bool is_aligned = true;
};

// Calls row(index of its first element, its address, length, step) for each row of a block until one is false.
template <class Row>
bool each_row(const Dims& dims, uintptr_t base, Row row) {
  int64_t at[kMostDims] = {0};
  const int64_t length = dims.lengths[dims.outer], step = dims.steps[dims.outer];
  for (int64_t index = 0; index < dims.total; index += length) {
    if (!row(index, base, length, step)) return false;
    for (int i = dims.outer - 1; i >= 0; --i) {
      base += dims.steps[i];
      if (++at[i] < dims.lengths[i]) break;
      base -= (uintptr_t)dims.steps[i] * dims.lengths[i];
      at[i] = 0;
    }
  }
  return true;
}

// Returns -1 or the first element that a card would refuse. `whole` touches a row without a mask.
template <class T, class Whole, class Touch>
int64_t each_block(const Block& block, Whole whole, Touch touch) {
  const Dims dims(block);
  Checked checked;
  int64_t refused = -1;
  for (int64_t program = 0; program < block.programs; ++program) {
    if (block.active && !block.active[program]) continue;
    const uintptr_t base = block.bases[program * block.base_step];
    const uint8_t* mask = block.mask ? block.mask + program * block.mask_step : nullptr;
    const int64_t first = program * dims.total;
    const bool is_inside = dims.is_aligned && base % sizeof(T) == 0 && checked.holds(base + dims.low, base + dims.high);
    each_row(dims, base, [&](int64_t index, uintptr_t row, int64_t length, int64_t step) {
      if (is_inside && !mask) {
        whole(first + index, (char*)row, length, step);
        return true;
      }
      for (int64_t i = 0; i < length; ++i) {
        if (mask && !mask[index + i]) continue;
        const uintptr_t address = row + (uintptr_t)i * step;
        if (!is_inside && !checked.allows(address, sizeof(T))) {
          refused = first + index + i;
          return false;
        }
        touch(first + index + i, (char*)address);
      }
      return true;
    });
    if (refused >= 0) break;
  }
  return refused;
}

template <class T>
int64_t load(T* to, const Block& block) {
  auto whole = [&](int64_t at, const char* from, int64_t length, int64_t step) {
    if (step == sizeof(T)) {
      memcpy(to + at, from, length * sizeof(T));
    } else {
      for (int64_t i = 0; i < length; ++i) memcpy(to + at + i, from + i * step, sizeof(T));
    }
  };
  return each_block<T>(block, whole, [&](int64_t at, const char* from) { memcpy(to + at, from, sizeof(T)); });
}
template <class T>
int64_t store(const T* from, const Block& block) {
  auto whole = [&](int64_t at, char* to, int64_t length, int64_t step) {
    if (step == sizeof(T)) {
      memcpy(to, from + at, length * sizeof(T));
    } else {
      for (int64_t i = 0; i < length; ++i) memcpy(to + i * step, from + at + i, sizeof(T));
    }
  };
  return each_block<T>(block, whole, [&](int64_t at, char* to) { memcpy(to, from + at, sizeof(T)); });
}
}  // namespace

// `to` and `from` have the elements of one program after those of the other. What is not loaded is left as it is.
API int64_t emulated_load_block(void* to, const Block* block) {
  const int size = block->size;
  BY_SIZE(load((T*)to, *block))
}
API int64_t emulated_store_block(const void* from, const Block* block) {
  const int size = block->size;
  BY_SIZE(store((const T*)from, *block))
}
