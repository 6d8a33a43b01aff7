// A caching allocator of host memory with the counters of a GPU's allocator.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceType.h>

#include <array>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace hostdevice {

constexpr c10::DeviceIndex kDevices = 2;
constexpr size_t kBlockBytes = 512;
constexpr int64_t kDefaultCapacityBytes = int64_t(8) << 30;

struct Block {
  void* data;
  size_t bytes;
  size_t requested_bytes;
  c10::DeviceIndex device;
  bool on_another_stream;
  int64_t note;  // what the history's recorder answered when it was allocated; -1 without one
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;
using StatArray = c10::CachingAllocator::StatArray;

inline void rise(StatArray& stat, size_t amount) { stat[0].increase(amount); }
inline void fall(StatArray& stat, size_t amount) { stat[0].decrease(amount); }

c10::DeviceIndex current_device();

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    void* data = bytes == 0 ? nullptr : take(bytes, device);
    return {data, data, &Allocator::free_block, c10::Device(c10::DeviceType::PrivateUse1, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    finish_pending();
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) release_cached(device);
  }

  // As on CUDA: a block used on another stream is given back late, and until then is still counted
  // as requested, though no longer as allocated.
  void recordStream(const c10::DataPtr& ptr, c10::Stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(ptr.get());
    if (found != live_.end()) found->second.on_another_stream = true;
  }

  Stats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_.at(device);
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : counters(device)) (*stat)[0].reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : counters(device)) (*stat)[0].reset_peak();
  }

  void set_capacity(c10::DeviceIndex device, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_.at(device) = bytes;
  }

  void set_recorder(std::function<int64_t()> recorder) {
    std::lock_guard<std::mutex> lock(mutex_);
    recorder_ = std::move(recorder);
  }

  std::vector<Block> blocks() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Block> found;
    for (const auto& [data, block] : live_) found.push_back(block);
    return found;
  }

  void* take(size_t requested_bytes, c10::DeviceIndex device) {
    const size_t bytes = (requested_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    const int64_t note = ask_recorder();
    std::lock_guard<std::mutex> lock(mutex_);
    Block block{reuse(bytes, device), bytes, requested_bytes, device, false, note};
    if (block.data == nullptr) block.data = reserve(bytes, device);
    auto& stats = stats_.at(device);
    rise(stats.allocation, 1);
    rise(stats.active, 1);
    rise(stats.allocated_bytes, bytes);
    rise(stats.active_bytes, bytes);
    rise(stats.requested_bytes, requested_bytes);
    live_[block.data] = block;
    return block.data;
  }

  static void free_block(void* data);

 private:
  // Outside the lock: the recorder is Python, and waits for the interpreter.
  int64_t ask_recorder() {
    std::function<int64_t()> recorder;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      recorder = recorder_;
    }
    return recorder ? recorder() : -1;
  }

  void give_back(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(data);
    if (found == live_.end()) return;
    const Block block = found->second;
    live_.erase(found);
    fall(stats_.at(block.device).allocation, 1);
    fall(stats_.at(block.device).allocated_bytes, block.bytes);
    if (block.on_another_stream) {
      pending_.push_back(block);
    } else {
      cache(block);
    }
  }

  void finish_pending() {
    for (; !pending_.empty(); pending_.pop_front()) cache(pending_.front());
  }

  void cache(const Block& block) {
    auto& stats = stats_.at(block.device);
    fall(stats.active, 1);
    fall(stats.active_bytes, block.bytes);
    fall(stats.requested_bytes, block.requested_bytes);
    cached_.at(block.device).emplace(block.bytes, block.data);
  }

  void* reuse(size_t bytes, c10::DeviceIndex device) {
    auto found = cached_.at(device).find(bytes);
    if (found == cached_.at(device).end()) return nullptr;
    void* data = found->second;
    cached_.at(device).erase(found);
    return data;
  }

  void* reserve(size_t bytes, c10::DeviceIndex device) {
    auto& stats = stats_.at(device);
    const auto fits = [&] {
      return stats.reserved_bytes[0].current + int64_t(bytes) <= capacity_.at(device);
    };
    if (!fits()) {
      stats.num_alloc_retries += 1;
      finish_pending();
      release_cached(device);
    }
    void* data = fits() ? std::aligned_alloc(kBlockBytes, bytes) : nullptr;
    if (data == nullptr) {
      stats.num_ooms += 1;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "hostdevice out of memory. Tried to allocate ",
                       bytes, " bytes of ", capacity_.at(device), ", of which ",
                       stats.allocated_bytes[0].current, " are allocated");
    }
    rise(stats.segment, 1);
    rise(stats.reserved_bytes, bytes);
    stats.num_device_alloc += 1;
    return data;
  }

  void release_cached(c10::DeviceIndex device) {
    auto& stats = stats_.at(device);
    for (const auto& [bytes, data] : cached_.at(device)) {
      std::free(data);
      fall(stats.segment, 1);
      fall(stats.reserved_bytes, bytes);
      stats.num_device_free += 1;
    }
    cached_.at(device).clear();
  }

  std::array<StatArray*, 7> counters(c10::DeviceIndex device) {
    auto& stats = stats_.at(device);
    return {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
            &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes};
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> live_;
  std::deque<Block> pending_;
  std::array<std::multimap<size_t, void*>, kDevices> cached_;
  std::array<Stats, kDevices> stats_;
  std::array<int64_t, kDevices> capacity_{kDefaultCapacityBytes, kDefaultCapacityBytes};
  std::function<int64_t()> recorder_;
};

// Never destroyed: tensors may outlive every static object.
inline Allocator& allocator() {
  static auto* made = new Allocator();
  return *made;
}

inline void Allocator::free_block(void* data) {
  if (data != nullptr) allocator().give_back(data);
}

}  // namespace hostdevice
