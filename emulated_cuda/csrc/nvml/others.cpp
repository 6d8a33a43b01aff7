// Every function that no other file here has: it exists, and answers that it is not supported.
//
// The definitions are weak, so the linker prefers those of the other files.
#include "nvml.hpp"

#define X(name) \
  extern "C" __attribute__((visibility("default"), weak)) int name() { return kNvmlNotSupported; }
#include "names.hpp"
