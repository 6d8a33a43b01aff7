/* Memory that other libraries lend to tensors: each byte counts once, however many tensors use it.

   A window is what one tensor's storage uses of it; windows may overlap. A piece is a part that at
   least one window covers. Pieces are blocks of the CPU that do not overlap: a new window adds a piece
   for each of its parts that no other window covers, and a window that is removed takes away what no
   other covers, for which pieces are split. So a part keeps the serial number of the window that
   covered it first.

   Parts of the blocks of torch's own allocators are lent to tensors too, by tensor.numpy(), and count
   nothing. The index of those blocks is updated only when memory is lent, so that allocating takes no
   longer: blocks are added to it then, and those that were freed are removed when they are met. */
#include "blocks.h"
#include "intervals.h"

#define LEAST_REBUILT 4096

static Intervals windows, pieces;
static Intervals blocks; /* addresses of torch's blocks, each as an empty interval */
static uint32_t blocks_count; /* how many are in the index, those included that were freed */
static uint64_t indexed_serial; /* the last allocation that the index knows */
static int is_indexed; /* whether it knows the blocks that are older than counting */

void forget_index(void) { is_indexed = 0; }

static void index_block(uintptr_t address) {
    const Interval *known = last_start(&blocks, address);
    if (known && known->start == address) return;
    if (intervals_add(&blocks, address, address)) blocks_count++;
    else lost_allocations++;
}

static void update_index(const Device *device) {
    if (blocks_count > 2 * (uint64_t)blocks_in_use() + LEAST_REBUILT) is_indexed = 0;
    if (!is_indexed) {
        intervals_clear(&blocks);
        blocks_count = 0;
    }
    for (uint32_t at = device->newest; at != NONE; at = nodes[at].older) {
        if (is_indexed && nodes[at].serial <= indexed_serial) break;
        if (!nodes[at].is_lent) index_block(nodes[at].address);
    }
    indexed_serial = allocation_count;
    is_indexed = 1;
}

/* Whether an address is in a block of torch's own allocators. */
static int is_torchs(const Device *device, uintptr_t address) {
    update_index(device);
    for (const Interval *last; (last = last_start(&blocks, address));) {
        const Node *node = block_at(last->start, CPU_DEVICE);
        if (node && !node->is_lent) return address < node->address + (uintptr_t)node->bytes;
        intervals_remove(&blocks, last->start, last->end); /* it was freed */
        blocks_count--;
    }
    return 0;
}

static void add_piece(uintptr_t start, uintptr_t end, uint64_t serial, uint32_t stack, Device *device) {
    if (!intervals_add(&pieces, start, end)) {
        lost_allocations++;
        return;
    }
    add_lent(start, (int64_t)(end - start), device, serial, stack);
}

/* Divide a piece at an address. Return 0 if there is no memory. */
static int split_piece(uintptr_t start, uintptr_t end, uintptr_t at) {
    if (!intervals_add(&pieces, start, at)) return 0;
    if (!intervals_add(&pieces, at, end)) {
        intervals_remove(&pieces, start, at);
        return 0;
    }
    if (!split_lent(start, at)) {
        intervals_remove(&pieces, start, at);
        intervals_remove(&pieces, at, end);
        return 0;
    }
    intervals_remove(&pieces, start, end);
    return 1;
}

/* Free the parts of pieces from `start` to `end`, which no window covers any longer. Return their bytes. */
static int64_t uncover(uintptr_t start, uintptr_t end, Device *device) {
    int64_t freed = 0;
    while (start < end) {
        const Interval *last = last_start(&pieces, start);
        if (!last || last->end <= start) {
            start = next_start(&pieces, start);
            continue;
        }
        uintptr_t piece = last->start, piece_end = last->end;
        /* Without memory to split a piece, all of it counts as freed. */
        if (piece < start && split_piece(piece, piece_end, start)) piece = start;
        if (piece_end > end && split_piece(piece, piece_end, end)) piece_end = end;
        freed += free_lent(piece, device);
        intervals_remove(&pieces, piece, piece_end);
        start = piece_end;
    }
    return freed;
}

/* Return the end of the part from `*start` on that no window covers, after moving `*start` to its
   begin; no further than `end`. */
static uintptr_t next_gap(uintptr_t *start, uintptr_t end) {
    for (uintptr_t reach; *start < end && (reach = reach_from(&windows, *start)) > *start;) *start = reach;
    if (*start >= end) return end;
    uintptr_t next = next_start(&windows, *start);
    return next < end ? next : end;
}

/* Whether a window has parts that count and that no other window covers. */
static int is_uncovered(uintptr_t start, uintptr_t end) {
    lock_blocks();
    Device *device = device_of(CPU_DEVICE);
    next_gap(&start, end);
    int found = start < end && device && !is_torchs(device, start);
    unlock_blocks();
    return found;
}

/* Add a window, which was lent before counting began if it is not new. Return 0 if it is in a block of
   torch's own allocators. */
EXPORT int lent_add(uintptr_t start, int64_t bytes, int is_new) {
    uintptr_t end = start + (uintptr_t)bytes;
    int64_t added = 0;
    /* Looked up first, because it takes longer than all the rest. */
    int needs_stack = is_new && any_region_open() && is_uncovered(start, end);
    uint32_t stack = needs_stack ? current_stack() : NO_STACK;
    lock_blocks();
    Device *device = device_of(CPU_DEVICE);
    int is_lent = device && bytes > 0 && !is_torchs(device, start);
    if (is_lent) {
        for (uintptr_t from = start, to; to = next_gap(&from, end), from < end; from = to) {
            add_piece(from, to, is_new ? ++allocation_count : 0, stack, device);
            added += (int64_t)(to - from);
        }
        if (!intervals_add(&windows, start, end)) lost_allocations++;
        change_level(device, added);
    }
    unlock_blocks();
    return is_lent;
}

/* Remove a window that was added. */
EXPORT void lent_remove(uintptr_t start, int64_t bytes) {
    uintptr_t end = start + (uintptr_t)bytes;
    lock_blocks();
    Device *device = device_of(CPU_DEVICE);
    if (device && intervals_remove(&windows, start, end)) {
        int64_t freed = 0;
        for (uintptr_t from = start, to; to = next_gap(&from, end), from < end; from = to)
            freed += uncover(from, to, device);
        change_level(device, -freed);
    }
    unlock_blocks();
}

/* Return whether several windows cover parts of the block at an address. */
EXPORT int lent_is_shared(uintptr_t address) {
    lock_blocks();
    const Node *node = block_at(address, CPU_DEVICE);
    int is_shared = node && node->is_lent &&
                    count_overlapping(&windows, address, address + (uintptr_t)node->bytes, 2) > 1;
    unlock_blocks();
    return is_shared;
}
