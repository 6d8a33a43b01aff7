// What launches of the runtime and of the driver have in common.
#pragma once

#include "pending.hpp"

// Waits for a stream's earlier work, counts the launch, and returns an error if a card would refuse it.
int check_launch(Dim3 grid, Dim3 block, size_t shared, Stream stream);
int set_kernel_attribute(int which, int value);
