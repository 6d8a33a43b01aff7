// Pools of device memory, and what they need of memory.cpp.
#pragma once

#include "emulated.hpp"

struct Pool;
// Takes back what an allocation had of a pool. Hold the mutex.
void give_to_pool(Pool* pool, size_t size);

// In memory.cpp. Hold the mutex. The addresses are 0 if there are none.
uintptr_t find_addresses(int device, size_t size);
void add_pooled_piece(uintptr_t start, size_t size, int device, Pool* pool);
