// Functions for Python in addition to those of torch.accelerator.
#include "operators.h"

#include <pybind11/pybind11.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  hostdevice::register_device();
  // A block that no tensor owns, as a library's workspace is; never freed.
  m.def("hold", [](size_t bytes) { hostdevice::allocator().take(bytes); });
}
