// Counts every byte requested from torch's CPU allocator, by replacing that allocator.
#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

class Counter final : public c10::Allocator {
 public:
  explicit Counter(c10::Allocator* plain) : plain_(plain) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto plain = plain_->allocate(bytes);
    void* data = plain.get();
    plain.release_context();
    if (data != nullptr) {
      std::lock_guard<std::mutex> lock(mutex_);
      sizes_[data] = bytes;
      live_ += int64_t(bytes);
      peak_ = std::max(peak_, live_);
    }
    return {data, data, &Counter::release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Counter::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  int64_t live() {
    std::lock_guard<std::mutex> lock(mutex_);
    return live_;
  }

  int64_t peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    return peak_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = live_;
  }

  static void release(void* data);

 private:
  void forget(void* data) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = sizes_.find(data);
      if (found != sizes_.end()) {
        live_ -= int64_t(found->second);
        sizes_.erase(found);
      }
    }
    plain_->raw_deleter()(data);
  }

  c10::Allocator* plain_;
  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

// Never destroyed: what it allocated may outlive every static object.
Counter& counter() {
  static auto* made = new Counter(c10::GetAllocator(c10::DeviceType::CPU));
  return *made;
}

void Counter::release(void* data) {
  if (data != nullptr) counter().forget(data);
}

}  // namespace

extern "C" {
void hostcounter_install() { c10::SetAllocator(c10::DeviceType::CPU, &counter(), 1); }
int64_t hostcounter_live() { return counter().live(); }
int64_t hostcounter_peak() { return counter().peak(); }
void hostcounter_reset_peak() { counter().reset_peak(); }
}
