// Operators that cannot run on the CPU and copy their result: creating, viewing, copying tensors.
#pragma once

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace hostdevice {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

const c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

inline Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>,
                    optional<at::Device>, optional<bool>, optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype,
                            optional<at::Layout>, optional<at::Device>, optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// The same memory, as a tensor of the CPU.
inline Tensor on_host(const Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(),
                       tensor.strides(), tensor.options().device(at::kCPU));
}

inline Tensor copy_from(const Tensor& self, const Tensor& target, bool) {
  on_host(target).copy_(on_host(self));
  return target;
}

// For operators that ran on the CPU and write to a tensor of the same size.
inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  TORCH_CHECK(self.sizes() == target.sizes(), "hostdevice cannot resize a tensor");
  return copy_from(self, target, false);
}

inline at::Scalar item(const Tensor& self) {
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

inline void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
}

}  // namespace hostdevice
