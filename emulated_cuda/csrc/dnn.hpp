// What the files about cuDNN share: its real functions that need no card.
#pragma once

#include "emulated.hpp"

#include <dlfcn.h>

// torch's libraries are loaded RTLD_LOCAL, so RTLD_NEXT would not find the real functions.
template <class Function>
static Function* real(const char* name) {
  static void* library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD);
  auto found = library ? (Function*)dlsym(library, name) : nullptr;
  if (!found) refuse_by_exception(name, "libcudnn.so.9 is not loaded; use a CUDA build of torch.");
  return found;
}

// Of a tensor descriptor: cudnnDataType_t, and sizes and strides in the order batch, channels, places.
constexpr int kMostDimensions = 8;
struct DnnTensor {
  int type = 0, dimensions = 0;
  int sizes[kMostDimensions] = {}, strides[kMostDimensions] = {};
};
inline DnnTensor described(const void* descriptor) {
  DnnTensor found;
  static auto get = real<int(const void*, int, int*, int*, int*, int*)>("cudnnGetTensorNdDescriptor");
  get(descriptor, kMostDimensions, &found.type, &found.dimensions, found.sizes, found.strides);
  return found;
}
enum : int { kFloat = 0, kDouble = 1, kHalf = 2, kBfloat16 = 9 };  // cudnnDataType_t
inline int64_t ceil_divided(int64_t number, int64_t by) { return (number + by - 1) / by; }
