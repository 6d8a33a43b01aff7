// NCCL's log of calls, which NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL ask for.
#pragma once

#include "communicator.hpp"

struct Logged {
  const char* name;  // "AllReduce"
  const void* send;
  const void* recv;
  size_t count;
  int type, op, root;
};
// Writes a line, as NCCL does, if the environment asks for it. To be called before the work is given.
void log_call(const Logged& call, Communicator* communicator, Stream stream);
