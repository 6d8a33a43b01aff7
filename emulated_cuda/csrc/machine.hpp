// The memory of this machine (machine.cpp).
#pragma once

#include "emulated.hpp"

// Whether `size` bytes more may be written on the devices; always if no values are computed. Hold the mutex of
// memory.
bool machine_has(size_t size);
// Whether it had no memory for the last allocation of this thread, and nobody has asked for the text yet.
bool is_problem_of_machine_new();
// The text of the error then; null if the last allocation of this thread was not refused for it.
const char* problem_of_machine();
