// What this process waits for, as the other processes can see it: so that processes which wait for each
// other in a circle find that out. Each has a page of shared memory, which others open under /proc.
#pragma once

#include <cstdint>
#include <vector>

// A process and its page, in one number.
int64_t this_process();
inline int pid_of(int64_t process) { return (int)(process >> 32); }
// Shows others for which processes this thread waits; empty when it waits no more.
void show_waiting(const std::vector<int64_t>& missing);
// Whether some process waits for this one while this one waits for it, directly or through others.
bool is_in_circle();
// Whether a process has ended, also if nobody has taken note of its end.
bool has_ended(int pid);
