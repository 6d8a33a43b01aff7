// How far a device has come with the work of each stream, if it is to come as late as it may.
//
// Work is done when it is given, so an event is done as soon as it is recorded, and torch's allocator
// has the blocks of side streams back at once. On a card they come back later, and the reserve may be
// larger. If `events_are_late`, an event is done only when the host must know it: it has waited for it,
// or for something behind it, or so much was given to its stream since that a launch had to wait.
#pragma once

#include "emulated.hpp"

extern bool events_are_late;

// A place in the work of a stream: behind the first `number` pieces.
struct Place {
  int device;  // of a default stream; -1 for others, whose addresses differ from each other
  Stream stream;
  uint64_t number;
};

void count_given(Stream stream);  // one more piece of work
Place place_of(Stream stream);    // behind all that was given so far
bool has_come_to(const Place& place);
void let_wait(Stream stream, const Place& place);  // what the stream gets from now on is behind that place
void host_has_waited_for(const Place& place);
void host_has_waited_for_device();
void forget_progress(Stream stream);
