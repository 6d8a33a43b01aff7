/* Ordered sets of intervals of addresses. The caller holds a lock. */
#ifndef CKA_MEMORY_INTERVALS_H
#define CKA_MEMORY_INTERVALS_H

#include <stdint.h>

typedef struct {
    uintptr_t start, end;
    uintptr_t reach; /* the highest end below this node of the tree, itself included */
    uint32_t left, right, priority;
    uint32_t count; /* how often it was added */
} Interval;

/* Empty if it is zero. */
typedef struct {
    Interval *items; /* items[0] stands for no interval */
    uint32_t used, size, unused, root;
} Intervals;

int intervals_add(Intervals *set, uintptr_t start, uintptr_t end);
int intervals_remove(Intervals *set, uintptr_t start, uintptr_t end);
void intervals_clear(Intervals *set);
uintptr_t reach_from(const Intervals *set, uintptr_t address);
uintptr_t next_start(const Intervals *set, uintptr_t address);
const Interval *last_start(const Intervals *set, uintptr_t address);
uint32_t count_overlapping(const Intervals *set, uintptr_t start, uintptr_t end, uint32_t most);

#endif
