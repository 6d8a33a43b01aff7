// Reductions of NCCL over what several ranks show.
#pragma once

#include "communicator.hpp"

size_t width_of(int type);  // in bytes; 0 if there is no such type
// Writes the reduction of `count` elements from each rank.
void reduce(int type, int op, double factor, const std::vector<const char*>& from, size_t count, char* to);

// ---- Sums with a factor ----

double factor_of(int op);
int add_factor(const void* scalar, int type);  // a new operation; -1 if the type has no fractions
void remove_factor(int op);
