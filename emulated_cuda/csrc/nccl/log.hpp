// NCCL's log: of how communicators are configured, which NCCL_DEBUG=INFO asks for, and of calls, with
// NCCL_DEBUG_SUBSYS=COLL.
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

struct Config {  // the first members of ncclConfig_t, which all versions that torch uses have
  size_t size;
  unsigned int magic, version;
  int blocking, cluster_size, min_ctas, max_ctas;
  const char* net_name;
  int split_share;
};
// Writes a line for each setting of a communicator that its maker gives.
void log_config(const Config* config);
