/* What blocks.c, lent.c, operators.c, regions.c and recordings.c share. It is used only while the lock of blocks is held. */
#ifndef CKA_MEMORY_BLOCKS_H
#define CKA_MEMORY_BLOCKS_H

#include "counter.h"

#define NONE UINT32_MAX

/* A live block, or an unused place for one. */
typedef struct {
    uintptr_t address;
    int64_t bytes;
    uint64_t serial;
    uint64_t older_serial; /* of the block from which the first `older_bytes` were moved here */
    int64_t older_bytes;
    uint32_t stack;
    uint32_t newer, older; /* of the same device; `older` also links unused nodes */
    int device;
    uint64_t operator_call; /* during which it was allocated, see operators.c; 0 outside of operators */
    int is_lent; /* whether it is a piece of memory that other libraries lend, see lent.c */
} Node;

typedef struct {
    int number;
    int64_t level, reserved;
    int64_t peak, peak_reserved; /* since a region last began or ended */
    uint32_t newest, oldest;
    Region *regions;
    int64_t pending; /* bytes of blocks that may turn out to be scratch memory, see operators.c */
} Device;

/* blocks.c */
extern Node *nodes;
extern uint64_t allocation_count; /* number of allocations so far, on all devices */
extern int64_t lost_allocations;  /* allocations that could not be recorded because memory ran out */
Device *device_of(int number);
uint32_t blocks_in_use(void);
int64_t bytes_since(const Node *node, uint64_t since);
const Node *block_at(uintptr_t address, int number);
void change_level(Device *device, int64_t by);
void add_lent(uintptr_t address, int64_t bytes, Device *device, uint64_t serial, uint32_t stack);
int64_t free_lent(uintptr_t address, Device *device);
int split_lent(uintptr_t address, uintptr_t at);

/* lent.c */
void forget_index(void);

/* operators.c */
void block_is_pending(Node *node, Device *device);
void block_was_pending(const Node *node, Device *device);

/* recordings.c */
typedef struct Recording Recording;
typedef struct Recorded Recorded;
Recording *new_recording(int device, uint32_t most);
void record_allocated(const Node *node);
void record_freed(const Node *node, uint32_t freed);
void record_split(const Node *node, int64_t bytes);
void note_peak(Recording *recording);
void stop_recording(const Recording *recording);
void read_recording(const Recording *recording, Recorded *out);
void free_recording(Recording *recording);

/* regions.c */
void raise_peaks(const Device *device);
void note_freed(const Node *node, const Device *device, uint32_t how);
void note_freed_with_graph(const Node *node, const Device *device);
void note_collected(const Node *node, const Device *device);

#endif
