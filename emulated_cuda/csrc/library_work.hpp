// Work of NVIDIA's libraries for linear algebra and Fourier transforms: it is counted, and computes nothing.
#pragma once

#include "pending.hpp"
#include "profiling.hpp"

// Gives work to a stream; `name` must live as long as the process. False if earlier work of the stream failed.
inline bool give_library_work(Stream stream, const char* name, const char* note) {
  ProfiledCallScope profiled(kCallLaunch);
  if (wait_for_stream(stream)) return false;
  count_work();
  profiled.kernel(name, stream);
  note_work(note);
  return true;
}
