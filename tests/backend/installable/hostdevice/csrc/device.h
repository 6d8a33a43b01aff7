// One device in host memory with one stream: its guard and its hooks.
#pragma once

#include "allocator.h"

#include <string_view>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace hostdevice {

// Everything runs at once, so there is nothing to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// With HOSTDEVICE_COUNTERS=0 in the environment torch finds an allocator that counts nothing.
inline void register_device() {
  static UncountedAllocator uncounted;
  const char* counters = std::getenv("HOSTDEVICE_COUNTERS");
  const bool counted = counters == nullptr || std::string_view(counters) != "0";
  c10::SetAllocator(kType, counted ? static_cast<c10::Allocator*>(&allocator()) : &uncounted);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace hostdevice
