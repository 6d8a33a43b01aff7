// Functions for Python in addition to those of torch.accelerator. Python calls them by ctypes: to
// compile a module with pybind11 takes half as long again.
#include "operators.h"

extern "C" {
void hostdevice_register() { hostdevice::register_device(); }
// A block that no tensor owns, as a library's workspace is; never freed.
void hostdevice_hold(size_t bytes) { hostdevice::allocator().take(bytes); }
}
