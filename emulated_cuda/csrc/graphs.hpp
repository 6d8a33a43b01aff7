// Streams that capture a CUDA graph.
#pragma once

#include "pending.hpp"

// The number of the graph that a stream captures; 0 if it captures none.
uint64_t capture_of(Stream stream);
// Lets a stream take part in a capture, because it waits for an event that `joined` has recorded in it.
void join_capture(Stream stream, uint64_t number, Stream joined);
// The stream is destroyed: it takes part in no capture any longer, and ends its own.
void forget_captures(Stream stream);
// An error, which makes the capture invalid, if the stream captures; or if any stream does.
int check_no_capture(Stream stream);
int check_no_captures();
// Has Python record work outside operators if the stream captures: a kernel by name, a copy, or, if there is
// nothing to copy from, the call of NCCL with that number.
bool record_work(Stream stream, const char* kernel, void* to, const void* from, size_t size);
// What ending a capture says that is not valid, in this thread.
const char* invalid_capture_text();
