// What a communicator's thread does for each call of NCCL. Each returns a result of NCCL.
#pragma once

#include "communicator.hpp"

int all_reduce(Communicator&, const void* send, void* recv, size_t count, int type, int op, double factor);
int reduce_to(Communicator&, const void* send, void* recv, size_t count, int type, int op, double factor, int root);
int reduce_scatter(Communicator&, const void* send, void* recv, size_t count, int type, int op, double factor);
int broadcast(Communicator&, const void* send, void* recv, size_t count, int type, int root);
int all_gather(Communicator&, const void* send, void* recv, size_t count, int type);
int gather_to(Communicator&, const void* send, void* recv, size_t count, int type, int root);
int all_to_all(Communicator&, const void* send, void* recv, size_t count, int type);
// Messages to and from other ranks, all together.
int move(Communicator&, const std::vector<Transfer>& transfers);
// Whether all of these bytes are known values, as what is sent must be.
bool can_be_sent(const void* start, size_t bytes);
