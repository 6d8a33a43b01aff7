// Two devices in host memory with one stream each: the current device, its guard and its hooks.
#pragma once

#include "allocator.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace hostdevice {

constexpr auto kType = c10::DeviceType::PrivateUse1;

inline thread_local c10::DeviceIndex current = 0;

inline c10::DeviceIndex current_device() { return current; }

inline void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "hostdevice has no device ", int(index));
  current = index;
}

inline c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  const auto before = current;
  if (index >= 0) set_current_device(index);
  return before;
}

// Everything runs at once, so there is nothing to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    allocator().recordStream(ptr, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    for (const auto& block : allocator().blocks()) {
      if (block.data == data) return {kType, block.device};
    }
    TORCH_CHECK(false, "no hostdevice has this memory");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = allocator().allocate(bytes);
    const auto kept = std::min(bytes, storage.nbytes());
    if (kept > 0) allocator().copy_data(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

inline void register_device() {
  c10::SetAllocator(kType, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace hostdevice
