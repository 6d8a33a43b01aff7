/* Live blocks, by address and in the order of their allocation, and the levels of devices. */
#include "blocks.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
Node *nodes;
uint64_t allocation_count;
int64_t lost_allocations;
static uint32_t nodes_size, unused = NONE, used;
static uint32_t *slots; /* open addressing: address -> node */
static uint32_t slots_size; /* always twice nodes_size, so half of them are free at least */
static Device devices[MAX_DEVICES];
static int device_count;
static __thread int drops_workspaces, collects;
/* While this thread moves a storage to a block of another size: both blocks. */
static __thread struct {
    int active, device;
    uintptr_t to;
    uint64_t serial;
    int64_t bytes;
} moving;

/* The block that this thread has freed last, and its device. */
static __thread Node last_freed;
static __thread Device *last_device;

void lock_blocks(void) { pthread_mutex_lock(&lock); }
void unlock_blocks(void) { pthread_mutex_unlock(&lock); }
uint32_t blocks_in_use(void) { return used; }
EXPORT uint32_t counter_live(void) {
    lock_blocks();
    uint32_t live = used;
    unlock_blocks();
    return live;
}

Device *device_of(int number) {
    for (int i = 0; i < device_count; i++)
        if (devices[i].number == number) return &devices[i];
    if (device_count == MAX_DEVICES) return NULL;
    Device *device = &devices[device_count++];
    int64_t reserved = number == CPU_DEVICE ? UNKNOWN : 0;
    *device = (Device){number, 0, reserved, 0, reserved, NONE, NONE, NULL, 0};
    return device;
}

static uint32_t slot_of(uintptr_t address) {
    uint64_t mixed = (uint64_t)(address >> 4) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(mixed >> 32) & (slots_size - 1);
}

/* Return the slot of a block, or the free slot where it belongs. */
static uint32_t find(uintptr_t address, int device) {
    uint32_t at = slot_of(address);
    while (slots[at] != NONE &&
           (nodes[slots[at]].address != address || nodes[slots[at]].device != device))
        at = (at + 1) & (slots_size - 1);
    return at;
}

static int grow(void) {
    uint32_t size = nodes_size ? 2 * nodes_size : 4096;
    Node *more = realloc(nodes, size * sizeof *more);
    if (!more) return 0;
    nodes = more;
    uint32_t *again = malloc(2 * (size_t)size * sizeof *again);
    if (!again) return 0;
    free(slots);
    slots = again;
    slots_size = 2 * size;
    memset(slots, 0xff, slots_size * sizeof *slots);
    for (uint32_t i = nodes_size; i < size; i++) {
        nodes[i] = (Node){.older = unused, .device = -1};
        unused = i;
    }
    for (uint32_t i = 0; i < nodes_size; i++)
        if (nodes[i].device >= 0) slots[find(nodes[i].address, nodes[i].device)] = i;
    nodes_size = size;
    return 1;
}

static void empty_slot(uint32_t hole) {
    slots[hole] = NONE;
    for (uint32_t at = (hole + 1) & (slots_size - 1); slots[at] != NONE;
         at = (at + 1) & (slots_size - 1)) {
        uint32_t home = slot_of(nodes[slots[at]].address);
        if (((at - home) & (slots_size - 1)) < ((at - hole) & (slots_size - 1))) continue;
        slots[hole] = slots[at];
        slots[at] = NONE;
        hole = at;
    }
}

static void set_level(Device *device, int64_t level, int64_t reserved) {
    device->level = level;
    if (reserved != UNKNOWN) device->reserved = reserved;
    if (level > device->peak) device->peak = level;
    if (device->reserved > device->peak_reserved) device->peak_reserved = device->reserved;
    raise_peaks(device);
}

static void unlink_node(Device *device, uint32_t at) {
    uint32_t newer = nodes[at].newer, older = nodes[at].older;
    *(newer == NONE ? &device->newest : &nodes[newer].older) = older;
    *(older == NONE ? &device->oldest : &nodes[older].newer) = newer;
}

/* Keep the order of serial numbers; nearly always the node is the newest. */
static void link_node(Device *device, uint32_t at) {
    uint32_t older = nodes[at].serial ? device->newest : NONE;
    while (older != NONE && nodes[older].serial > nodes[at].serial) older = nodes[older].older;
    uint32_t newer = older == NONE ? device->oldest : nodes[older].newer;
    nodes[at].newer = newer;
    nodes[at].older = older;
    *(newer == NONE ? &device->newest : &nodes[newer].older) = at;
    *(older == NONE ? &device->oldest : &nodes[older].newer) = at;
}

static void remove_node(uint32_t slot, Device *device, uint32_t how) {
    uint32_t at = slots[slot];
    note_freed(&nodes[at], device, how);
    record_freed(&nodes[at], how);
    unlink_node(device, at);
    empty_slot(slot);
    nodes[at] = (Node){.older = unused, .device = -1};
    unused = at;
    used--;
}

/* Return the new node; NULL if there is no memory. */
static Node *add_node(uintptr_t address, int64_t bytes, Device *device, uint64_t number, uint32_t stack) {
    if (unused == NONE && !grow()) {
        lost_allocations++;
        return NULL;
    }
    uint32_t slot = find(address, device->number);
    if (slots[slot] != NONE) { /* its release was not reported */
        if (device->number == CPU_DEVICE) device->level -= nodes[slots[slot]].bytes;
        remove_node(slot, device, 0);
        slot = find(address, device->number);
    }
    uint32_t at = unused;
    unused = nodes[at].older;
    nodes[at] = (Node){address, bytes, number, 0, 0, stack, NONE, NONE, device->number, 0, 0};
    link_node(device, at);
    slots[slot] = at;
    used++;
    record_allocated(&nodes[at]);
    return &nodes[at];
}

void block_allocated(const void *address, int64_t bytes, int number, int64_t level, int64_t reserved) {
    /* On an accelerator torch holds its allocator's lock here, so that nothing may wait for Python:
       its frames were noted before. */
    uint32_t stack = number != CPU_DEVICE ? take_stack() : any_region_open() ? current_stack() : NO_STACK;
    lock_blocks();
    Device *device = device_of(number);
    if (device) {
        Node *node = add_node((uintptr_t)address, bytes, device, ++allocation_count, stack);
        if (node && number == CPU_DEVICE) block_is_pending(node, device);
        set_level(device, level == UNKNOWN ? device->level + bytes : level, reserved);
    }
    unlock_blocks();
    note_allocation();
    if (moving.active) {
        moving.to = (uintptr_t)address;
        moving.device = number;
    }
}

/* Return the bytes of a block that were allocated after `since`. */
int64_t bytes_since(const Node *node, uint64_t since) {
    if (node->serial <= since) return 0;
    if (!node->older_bytes || node->older_serial > since) return node->bytes;
    return node->bytes > node->older_bytes ? node->bytes - node->older_bytes : 0;
}

static uint64_t origin_of(const Node *node, int64_t *bytes) {
    *bytes = node->older_bytes ? node->older_bytes : node->bytes;
    return node->older_bytes ? node->older_serial : node->serial;
}

void move_begins(void) {
    moving.active = 1;
    moving.to = 0;
    moving.bytes = 0;
}

void move_ends(void) {
    moving.active = 0;
    if (moving.to && moving.bytes)
        counter_inherit(moving.to, moving.device, moving.serial, moving.bytes);
}

/* Return how a block is freed. A tensor of Python's frees its graph before its own memory. */
static uint32_t way_of_freeing(const Node *node, Device *device) {
    if (!device->regions) return 0;
    if (drops_workspaces) return WORKSPACE;
    if (device->number != CPU_DEVICE && in_operator_of(node->stack)) return IN_OPERATOR;
    if (is_in_backward()) return IN_BACKWARD;
    if (frees_graph()) note_freed_with_graph(&last_freed, last_device);
    last_freed = *node;
    last_device = device;
    return 0;
}

/* Remove the block of a slot, and return its bytes. */
static int64_t free_node(uint32_t slot, Device *device) {
    const Node *node = &nodes[slots[slot]];
    int64_t bytes = node->bytes;
    if (moving.active) moving.serial = origin_of(node, &moving.bytes);
    block_was_pending(node, device);
    uint32_t how = way_of_freeing(node, device);
    if (collects) note_collected(node, device);
    remove_node(slot, device, how);
    return bytes;
}

void block_freed(const void *address, int number, int64_t level, int64_t reserved) {
    lock_blocks();
    Device *device = device_of(number);
    if (device && slots) {
        uint32_t slot = find((uintptr_t)address, number);
        if (slots[slot] != NONE) {
            int64_t bytes = free_node(slot, device);
            if (level == UNKNOWN) level = device->level - bytes;
        }
    }
    if (device && level != UNKNOWN) set_level(device, level, reserved);
    unlock_blocks();
}

/* Add a block that was live before counting began, or that was allocated outside torch. Return
   whether it was not known yet. */
EXPORT int counter_add(uintptr_t address, int64_t bytes, int number, int is_new) {
    uint32_t stack = is_new && any_region_open() ? current_stack() : NO_STACK;
    lock_blocks();
    Device *device = device_of(number);
    if (device && slots && slots[find(address, number)] != NONE) device = NULL; /* known already */
    if (device) {
        add_node(address, bytes, device, is_new ? ++allocation_count : 0, stack);
        if (number == CPU_DEVICE) set_level(device, device->level + bytes, UNKNOWN);
        if (!is_new) forget_index();
    }
    unlock_blocks();
    return device != NULL;
}

/* Return the live block at an address; NULL if there is none. */
const Node *block_at(uintptr_t address, int number) {
    uint32_t at = slots ? slots[find(address, number)] : NONE;
    return at == NONE ? NULL : &nodes[at];
}

void change_level(Device *device, int64_t by) { set_level(device, device->level + by, UNKNOWN); }

/* Add a block of lent memory. This and the next two leave the level as it is. */
void add_lent(uintptr_t address, int64_t bytes, Device *device, uint64_t serial, uint32_t stack) {
    Node *node = add_node(address, bytes, device, serial, stack);
    if (node) node->is_lent = 1;
}

/* Return the bytes of the block, 0 if it is not lent memory: its address may be torch's by now. */
int64_t free_lent(uintptr_t address, Device *device) {
    const Node *node = block_at(address, CPU_DEVICE);
    return node && node->is_lent ? free_node(find(address, CPU_DEVICE), device) : 0;
}

/* Divide a block of lent memory. Both parts are the same allocation. Return 0 if it was not possible. */
int split_lent(uintptr_t address, uintptr_t at) {
    const Node *known = block_at(address, CPU_DEVICE);
    if (!known || !known->is_lent || block_at(at, CPU_DEVICE)) return 0;
    if (unused == NONE && !grow()) return 0;
    uint32_t first = slots[find(address, CPU_DEVICE)], second = unused, older = nodes[first].older;
    Device *device = device_of(CPU_DEVICE);
    unused = nodes[second].older;
    nodes[second] = nodes[first];
    nodes[second].address = at;
    nodes[second].bytes -= (int64_t)(at - address);
    nodes[second].newer = first;
    *(older == NONE ? &device->oldest : &nodes[older].newer) = second;
    record_split(&nodes[first], nodes[second].bytes);
    nodes[first].older = second;
    nodes[first].bytes = (int64_t)(at - address);
    slots[find(at, CPU_DEVICE)] = second;
    used++;
    return 1;
}

EXPORT void counter_remove(uintptr_t address, int number) {
    block_freed((const void *)address, number, UNKNOWN, UNKNOWN);
}

/* Treat the first `bytes` of a block as those of an older one, from which they were moved. */
EXPORT void counter_inherit(uintptr_t address, int number, uint64_t older_serial, int64_t bytes) {
    lock_blocks();
    uint32_t at = slots ? slots[find(address, number)] : NONE;
    if (at != NONE) {
        nodes[at].older_serial = older_serial;
        nodes[at].older_bytes = bytes;
    }
    unlock_blocks();
}

/* Set the level of an accelerator, which is known before its allocator first reports it. */
EXPORT void counter_set_level(int number, int64_t level, int64_t reserved) {
    lock_blocks();
    Device *device = device_of(number);
    if (device) set_level(device, level == UNKNOWN ? device->level : level, reserved);
    unlock_blocks();
}

/* With `on`, count what this thread frees as workspaces of libraries. */
EXPORT void counter_drops_workspaces(int on) { drops_workspaces = on; }

/* With `on`, count what this thread frees as freed by the garbage collector. */
EXPORT void counter_collects(int on) { collects = on; }

/* Return a block's serial number, or UINT64_MAX if it is not live. */
EXPORT uint64_t counter_serial_of(uintptr_t address, int number) {
    lock_blocks();
    uint32_t slot = slots ? find(address, number) : 0;
    uint64_t found = slots && slots[slot] != NONE ? nodes[slots[slot]].serial : UINT64_MAX;
    unlock_blocks();
    return found;
}

/* Return the bytes of the live block at an address, and in `*serial` its number; -1 if there is none. */
EXPORT int64_t counter_block_at(uintptr_t address, int number, uint64_t *serial) {
    int64_t bytes = -1;
    lock_blocks();
    uint32_t at = slots ? slots[find(address, number)] : NONE;
    if (at != NONE) {
        bytes = nodes[at].bytes;
        *serial = nodes[at].serial;
    }
    unlock_blocks();
    return bytes;
}

/* Return the serial number and, in `*bytes`, the size of the allocation that a block continues: of the
   older one from which it was moved, otherwise its own. UINT64_MAX if no block is live there. */
EXPORT uint64_t counter_origin_of(uintptr_t address, int number, int64_t *bytes) {
    uint64_t found = UINT64_MAX;
    lock_blocks();
    uint32_t at = slots ? slots[find(address, number)] : NONE;
    if (at != NONE) found = origin_of(&nodes[at], bytes);
    unlock_blocks();
    return found;
}

/* Return the bytes of live blocks that were allocated after `since`; their number in `*count`. */
EXPORT int64_t counter_retained(int number, uint64_t since, uint64_t *count) {
    int64_t bytes = 0;
    *count = 0;
    lock_blocks();
    Device *device = device_of(number);
    for (uint32_t at = device ? device->newest : NONE; at != NONE && nodes[at].serial > since;
         at = nodes[at].older) {
        int64_t new_bytes = bytes_since(&nodes[at], since);
        bytes += new_bytes;
        *count += new_bytes > 0;
    }
    unlock_blocks();
    return bytes;
}

/* Write the live blocks allocated after `since`, newest first, `size` at most; return their number. */
EXPORT uint64_t counter_blocks(int number, uint64_t since, Block *out, uint64_t size) {
    uint64_t count = 0;
    lock_blocks();
    Device *device = device_of(number);
    for (uint32_t at = device ? device->newest : NONE;
         at != NONE && nodes[at].serial > since && count < size; at = nodes[at].older) {
        int64_t bytes = bytes_since(&nodes[at], since);
        if (bytes)
            out[count++] =
                (Block){nodes[at].address, bytes, nodes[at].serial, nodes[at].stack, 1, 0, 0};
    }
    unlock_blocks();
    return count;
}

/* Write the live blocks allocated until `until`, oldest first, `size` at most; return their number. */
EXPORT uint64_t counter_older(int number, uint64_t until, Block *out, uint64_t size) {
    uint64_t count = 0;
    lock_blocks();
    Device *device = device_of(number);
    for (uint32_t at = device ? device->oldest : NONE;
         at != NONE && nodes[at].serial <= until && count < size; at = nodes[at].newer)
        out[count++] =
            (Block){nodes[at].address, nodes[at].bytes, nodes[at].serial, nodes[at].stack, 1, 0, 0};
    unlock_blocks();
    return count;
}
