// Operators that cannot run on the CPU and copy their result: creating, viewing, copying tensors.
#pragma once

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace hostdevice {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

const c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

inline Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>,
                    optional<at::Device> device, optional<bool>,
                    optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype,
                            optional<at::Layout>, optional<at::Device> device, optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
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

inline const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const auto bytes = (impl->storage_offset() + impl->numel()) * self.itemsize();
  if (bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.sizes() != self.sizes()) resize_(target, self.sizes(), {});
  return copy_from(self, target, false);
}

inline Tensor& set_to_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, &allocator(), true);
  return at::native::set_storage_cpu_(self, nothing, 0, {0}, {});
}

inline at::Scalar item(const Tensor& self) {
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

inline void record_stream(Tensor& self, at::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

inline Tensor to_device(const Tensor& tensor, at::Device device) {
  return tensor.defined() ? tensor.to(device) : tensor;
}

inline Tensor convolution(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias,
                          IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                          bool transposed, IntArrayRef output_padding, int64_t groups) {
  const bool has_bias = bias.has_value() && bias->defined();
  const auto host_bias = has_bias ? optional<Tensor>(on_host(*bias)) : std::nullopt;
  return at::convolution(on_host(input), on_host(weight), host_bias, stride, padding, dilation,
                         transposed, output_padding, groups)
      .to(input.device());
}

inline std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  const int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), IntArrayRef(outputs), stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  const auto device = input.device();
  return {to_device(of_input, device), to_device(of_weight, device), to_device(of_bias, device)};
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
  m.impl("resize_", &resize_);
  m.impl("set_", &set_to_nothing);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage",
         static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace hostdevice
