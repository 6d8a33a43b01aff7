// Functions for Python in addition to those of torch.accelerator.
#include "operators.h"

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using hostdevice::allocator;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  hostdevice::register_device();
  m.def("device_count", [] { return int(hostdevice::kDevices); });
  m.def("current_device", [] { return int(hostdevice::current_device()); });
  m.def("set_device", [](int index) { hostdevice::set_current_device(c10::DeviceIndex(index)); });
  m.def("set_capacity", [](int device, int64_t bytes) {
    allocator().set_capacity(c10::DeviceIndex(device), bytes);
  });
  // A block that no tensor owns, as a library's workspace is.
  m.def("hold", [](size_t bytes, int device) {
    return reinterpret_cast<uintptr_t>(allocator().take(bytes, c10::DeviceIndex(device)));
  });
  m.def("let_go", [](uintptr_t data) {
    hostdevice::Allocator::free_block(reinterpret_cast<void*>(data));
  });
  m.def("set_recorder", [](std::optional<std::function<int64_t()>> recorder) {
    allocator().set_recorder(recorder.value_or(std::function<int64_t()>()));
  });
  m.def("blocks", [] {
    std::vector<std::tuple<int, uintptr_t, size_t, size_t, int64_t>> found;
    for (const auto& block : allocator().blocks()) {
      found.emplace_back(block.device, reinterpret_cast<uintptr_t>(block.data), block.bytes,
                         block.requested_bytes, block.note);
    }
    return found;
  });
}
