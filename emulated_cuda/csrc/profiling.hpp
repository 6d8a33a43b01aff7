// What torch's profiler learns of a device: kernels, copies and fills, and the calls that started them.
#pragma once

#include "emulated.hpp"

// Kinds of activity for which a profiler is on; usually none.
extern std::atomic<unsigned> profiled_kinds;

// Calls that a profile names, as CUPTI numbers them; those of the driver have kOfDriver added.
constexpr unsigned kOfDriver = 1u << 16;
enum ProfiledCall : unsigned {
  kCallLaunch = 211,
  kCallCopy = 41,
  kCallFill = 51,
  kCallGraphLaunch = 311,
  kCallStreamSynchronize = 131,
  kCallDeviceSynchronize = 165,
  kCallDriverLaunch = kOfDriver + 307,
};

// Records a call, from the construction until the destruction of this object, and what it makes the device do.
// Nothing is done on the device, so what it does has the times of the call on the host.
class ProfiledCallScope {
 public:
  explicit ProfiledCallScope(ProfiledCall call) {
    if (profiled_kinds) begin(call);
  }
  ~ProfiledCallScope() {
    if (is_on_) end();
  }
  // What the device does; `name` must live as long as the process.
  void kernel(const char* name, Stream stream, Dim3 grid = {1, 1, 1}, Dim3 block = {1, 1, 1}, size_t shared = 0) {
    if (is_on_) add_kernel(name, stream, grid, block, shared);
  }
  void copy(const void* to, const void* from, size_t size, Stream stream) {
    if (is_on_) add_copy(to, from, size, stream);
  }
  void fill(const void* start, unsigned value, size_t size, Stream stream) {
    if (is_on_) add_fill(start, value, size, stream);
  }

 private:
  void begin(ProfiledCall call);
  void end();
  void add_kernel(const char* name, Stream stream, Dim3 grid, Dim3 block, size_t shared);
  void add_copy(const void* to, const void* from, size_t size, Stream stream);
  void add_fill(const void* start, unsigned value, size_t size, Stream stream);
  bool is_on_ = false;
  ProfiledCall call_ = kCallLaunch;
  unsigned correlation_ = 0;
  uint64_t start_ = 0;
};
