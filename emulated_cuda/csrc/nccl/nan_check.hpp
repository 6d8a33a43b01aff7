// The kernels that torch launches before a collective if TORCH_NCCL_NAN_CHECK is set. They write nothing.
#pragma once

// Remembers a kernel if it is one of them. `function` is what the host launches it by.
void remember_nan_check(const void* function, const char* name);
bool is_nan_check(const void* function);
// Returns an assertion of the device if what would be sent has a NaN, for a function that is one of them.
// `arguments` are those of the launch: the address of the first element, and how many there are.
int check_for_nan(const void* function, void** arguments);
