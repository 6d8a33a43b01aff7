/* Pinned memory: blocks of the host that an accelerator can read, from torch's allocator for them.

   It reports nothing to the profiler, and its statistics count rounded sizes without addresses. So its
   virtual function `allocate` is replaced, and in what that returns, the function that frees a block.
   The blocks are counted as memory of the CPU, with the bytes that were asked for. */
#include "counter.h"

#include <pthread.h>
#include <stdlib.h>

/* The allocator identifies a block by a context, which is what the freeing function is given. */
typedef struct {
    uintptr_t context, address;
} Pinned;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Pinned *slots; /* open addressing: context -> address; a context of 0 is a free slot */
static uint32_t slots_size, used;
PinnedAllocate real_pinned_allocate;
uintptr_t pinned_code_start, pinned_code_end;
static void (*real_pinned_free)(void *);

void lock_pinned(void) { pthread_mutex_lock(&lock); }
void unlock_pinned(void) { pthread_mutex_unlock(&lock); }

static uint32_t home_of(uintptr_t context) {
    uint64_t mixed = (uint64_t)(context >> 4) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(mixed >> 32) & (slots_size - 1);
}

/* Return the slot of a context, or the free slot where it belongs. */
static uint32_t find(uintptr_t context) {
    uint32_t at = home_of(context);
    while (slots[at].context && slots[at].context != context) at = (at + 1) & (slots_size - 1);
    return at;
}

static int make_room(void) {
    if (2 * (used + 1) <= slots_size) return 1;
    Pinned *old = slots;
    uint32_t old_size = slots_size, size = old_size ? 2 * old_size : 256;
    Pinned *more = calloc(size, sizeof *more);
    if (!more) return 0;
    slots = more;
    slots_size = size;
    for (uint32_t i = 0; i < old_size; i++)
        if (old[i].context) slots[find(old[i].context)] = old[i];
    free(old);
    return 1;
}

static int add(uintptr_t context, uintptr_t address) {
    lock_pinned();
    int has_room = make_room();
    if (has_room) {
        uint32_t at = find(context);
        used += !slots[at].context;
        slots[at] = (Pinned){context, address};
    }
    unlock_pinned();
    return has_room;
}

/* Return the address that was added for a context and forget it; 0 if there is none. */
static uintptr_t take(uintptr_t context) {
    lock_pinned();
    uint32_t hole = find(context);
    uintptr_t address = slots[hole].address;
    if (slots[hole].context) {
        used--;
        slots[hole] = (Pinned){0, 0};
        for (uint32_t at = (hole + 1) & (slots_size - 1); slots[at].context;
             at = (at + 1) & (slots_size - 1)) {
            uint32_t home = home_of(slots[at].context);
            if (((at - home) & (slots_size - 1)) < ((at - hole) & (slots_size - 1))) continue;
            slots[hole] = slots[at];
            slots[at] = (Pinned){0, 0};
            hole = at;
        }
    }
    unlock_pinned();
    return address;
}

static void counted_pinned_free(void *context) {
    uintptr_t address = take((uintptr_t)context);
    /* Before it is freed, because another thread may get the same address at once. */
    if (address) block_freed((const void *)address, CPU_DEVICE, UNKNOWN, UNKNOWN);
    real_pinned_free(context);
}

/* May be left by a C++ exception, if no memory is left. */
DataPtr counted_pinned_allocate(void *allocator, size_t bytes) {
    DataPtr made = real_pinned_allocate(allocator, bytes);
    uintptr_t function = (uintptr_t)made.free;
    int is_known = function >= pinned_code_start && function < pinned_code_end;
    if (!made.context || !made.data || made.device_type != 0 || !is_known) return made;
    if (add((uintptr_t)made.context, (uintptr_t)made.data)) {
        real_pinned_free = made.free; /* the same for all blocks of this allocator */
        made.free = counted_pinned_free;
        block_allocated(made.data, (int64_t)bytes, CPU_DEVICE, UNKNOWN, UNKNOWN);
    }
    return made;
}
