// A caching allocator of host memory with the counters of a GPU's allocator.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceType.h>

#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

namespace hostdevice {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr size_t kBlockBytes = 512;

struct Block {
  size_t bytes;
  size_t requested_bytes;
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;
using StatArray = c10::CachingAllocator::StatArray;

inline void rise(StatArray& stat, size_t amount) { stat[0].increase(amount); }
inline void fall(StatArray& stat, size_t amount) { stat[0].decrease(amount); }

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : take(bytes);
    return {data, data, &Allocator::free_block, c10::Device(kType, 0)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // everything runs at once

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [bytes, data] : cached_) {
      std::free(data);
      fall(stats_.segment, 1);
      fall(stats_.reserved_bytes, bytes);
    }
    cached_.clear();
  }

  Stats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : counters()) (*stat)[0].reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : counters()) (*stat)[0].reset_peak();
  }

  void* take(size_t requested_bytes) {
    const size_t bytes = (requested_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    std::lock_guard<std::mutex> lock(mutex_);
    void* data = reuse(bytes);
    if (data == nullptr) data = reserve(bytes);
    rise(stats_.allocation, 1);
    rise(stats_.active, 1);
    rise(stats_.allocated_bytes, bytes);
    rise(stats_.active_bytes, bytes);
    rise(stats_.requested_bytes, requested_bytes);
    live_[data] = {bytes, requested_bytes};
    return data;
  }

  static void free_block(void* data);

 private:
  void give_back(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(data);
    if (found == live_.end()) return;
    const Block block = found->second;
    live_.erase(found);
    fall(stats_.allocation, 1);
    fall(stats_.active, 1);
    fall(stats_.allocated_bytes, block.bytes);
    fall(stats_.active_bytes, block.bytes);
    fall(stats_.requested_bytes, block.requested_bytes);
    cached_.emplace(block.bytes, data);
  }

  void* reuse(size_t bytes) {
    const auto found = cached_.find(bytes);
    if (found == cached_.end()) return nullptr;
    void* data = found->second;
    cached_.erase(found);
    return data;
  }

  void* reserve(size_t bytes) {
    void* data = std::aligned_alloc(kBlockBytes, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "hostdevice out of memory");
    rise(stats_.segment, 1);
    rise(stats_.reserved_bytes, bytes);
    return data;
  }

  std::array<StatArray*, 7> counters() {
    return {&stats_.allocation,     &stats_.segment,      &stats_.active,
            &stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes,
            &stats_.requested_bytes};
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> live_;
  std::multimap<size_t, void*> cached_;
  Stats stats_;
};

// Never destroyed: tensors may outlive every static object.
inline Allocator& allocator() {
  static auto* made = new Allocator();
  return *made;
}

inline void Allocator::free_block(void* data) {
  if (data != nullptr) allocator().give_back(data);
}

// The same memory by an allocator without counters: torch has no functions to ask it.
class UncountedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocator().allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return allocator().raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace hostdevice
