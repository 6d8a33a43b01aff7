// Which handles exist: a program may destroy one twice, or use one that it has destroyed.
#pragma once

#include <pthread.h>

#include <mutex>
#include <unordered_set>

// Never destroyed, because threads may use it while the process ends; a forked process may use it too.
inline std::mutex& handles_mutex() {
  static std::mutex* only = [] {
    static std::mutex* made = new std::mutex;
    pthread_atfork([] { made->lock(); }, [] { made->unlock(); }, [] { made->unlock(); });
    return made;
  }();
  return *only;
}

class Handles {
 public:
  template <class T>
  T* add(T* handle) {
    std::lock_guard<std::mutex> guard(handles_mutex());
    return live_->insert(handle), handle;
  }
  bool has(const void* handle) const {
    std::lock_guard<std::mutex> guard(handles_mutex());
    return live_->count(handle);
  }
  // False if there is no such handle.
  bool remove(const void* handle) {
    std::lock_guard<std::mutex> guard(handles_mutex());
    return live_->erase(handle);
  }

 private:
  std::unordered_set<const void*>* live_ = new std::unordered_set<const void*>;
};
