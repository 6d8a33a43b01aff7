// The figures of a process that `python -m emulated_cuda` reads (figures.cpp). Hold the mutex of memory.
#pragma once

#include "emulated.hpp"

void note_bytes_in_use(int device, size_t bytes);  // beside the context
void note_missing_bytes(int device, size_t bytes);  // what a refused allocation lacked
