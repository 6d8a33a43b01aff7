/* Live blocks, by address and in the order of their allocation; levels; open regions. */
#include "counter.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

typedef struct {
    uintptr_t address;
    int64_t bytes;
    uint64_t serial;
    uint64_t older_serial; /* of the block from which the first `older_bytes` were moved here */
    int64_t older_bytes;
    uint32_t stack;
    uint32_t newer, older; /* of the same device; `older` also links unused nodes */
    int device;
} Node;

typedef struct {
    int number;
    int64_t level, reserved;
    int64_t peak, peak_reserved; /* since a region last began or ended */
    uint32_t newest, oldest;
    Region *regions;
} Device;

/* What was live at a region's peak and has been freed since, of one stack. */
typedef struct {
    uint64_t peak_serial; /* the peak for which the rest was counted */
    int64_t bytes;
    uint32_t count, stack, inside;
} Freed;
#define KINDS_OF_FREED 3

struct Region {
    Region *next;
    Device *device;
    uint64_t start_serial, peak_serial;
    int64_t start_level, start_reserved;
    int64_t peak, peak_reserved, sample_peak;
    Freed *freed; /* by the number of the stack, without its generation, and by `inside` */
    uint32_t freed_size;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Node *nodes;
static uint32_t nodes_size, unused = NONE, used;
static uint32_t *slots; /* open addressing: address -> node */
static uint32_t slots_size; /* always twice nodes_size, so half of them are free at least */
static Device devices[MAX_DEVICES];
static int device_count;
static uint64_t serial;
static int64_t lost;
static volatile int open_regions;
static __thread int drops_workspaces;
/* While this thread moves a storage to a block of another size: both blocks. */
static __thread struct {
    int active, device;
    uintptr_t to;
    uint64_t serial;
    int64_t bytes;
} moving;

void lock_blocks(void) { pthread_mutex_lock(&lock); }
void unlock_blocks(void) { pthread_mutex_unlock(&lock); }
int any_region_open(void) { return open_regions > 0; }
EXPORT int counter_open_regions(void) { return open_regions; }

static Device *device_of(int number) {
    for (int i = 0; i < device_count; i++)
        if (devices[i].number == number) return &devices[i];
    if (device_count == MAX_DEVICES) return NULL;
    Device *device = &devices[device_count++];
    int64_t reserved = number == CPU_DEVICE ? UNKNOWN : 0;
    *device = (Device){number, 0, reserved, 0, reserved, NONE, NONE, NULL};
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
    for (Region *region = device->regions; region; region = region->next) {
        if (level > region->peak) {
            region->peak = level;
            region->peak_serial = serial;
        }
        if (level > region->sample_peak) region->sample_peak = level;
        if (device->reserved > region->peak_reserved) region->peak_reserved = device->reserved;
    }
}

/* Remember that a block was live at the peaks of the open regions. */
static void note_freed(const Node *node, const Device *device, uint32_t inside) {
    for (Region *region = device->regions; region; region = region->next) {
        if (node->serial <= region->start_serial || node->serial > region->peak_serial) continue;
        uint32_t at = KINDS_OF_FREED * (node->stack & 0xffff) + inside;
        if (at >= region->freed_size) {
            uint32_t size = 2 * at + 64;
            Freed *more = realloc(region->freed, size * sizeof *more);
            if (!more) {
                lost++;
                continue;
            }
            memset(more + region->freed_size, 0, (size - region->freed_size) * sizeof *more);
            region->freed = more;
            region->freed_size = size;
        }
        Freed *freed = &region->freed[at];
        if (freed->peak_serial != region->peak_serial)
            *freed = (Freed){region->peak_serial, 0, 0, node->stack, inside};
        freed->bytes += node->bytes;
        freed->count++;
    }
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

static void remove_node(uint32_t slot, Device *device, uint32_t inside) {
    uint32_t at = slots[slot];
    note_freed(&nodes[at], device, inside);
    unlink_node(device, at);
    empty_slot(slot);
    nodes[at] = (Node){.older = unused, .device = -1};
    unused = at;
    used--;
}

static void add_node(uintptr_t address, int64_t bytes, Device *device, uint64_t number, uint32_t stack) {
    if (unused == NONE && !grow()) {
        lost++;
        return;
    }
    uint32_t slot = find(address, device->number);
    if (slots[slot] != NONE) { /* that it was freed was not seen */
        if (device->number == CPU_DEVICE) device->level -= nodes[slots[slot]].bytes;
        remove_node(slot, device, 0);
        slot = find(address, device->number);
    }
    uint32_t at = unused;
    unused = nodes[at].older;
    nodes[at] = (Node){address, bytes, number, 0, 0, stack, NONE, NONE, device->number};
    link_node(device, at);
    slots[slot] = at;
    used++;
}

void block_allocated(const void *address, int64_t bytes, int number, int64_t level, int64_t reserved) {
    /* On an accelerator torch holds its allocator's lock here, so that nothing may wait for Python:
       its frames were noted before. */
    uint32_t stack = number != CPU_DEVICE ? take_stack() : open_regions > 0 ? current_stack() : NO_STACK;
    lock_blocks();
    Device *device = device_of(number);
    if (device) {
        add_node((uintptr_t)address, bytes, device, ++serial, stack);
        set_level(device, level == UNKNOWN ? device->level + bytes : level, reserved);
    }
    unlock_blocks();
    if (moving.active) {
        moving.to = (uintptr_t)address;
        moving.device = number;
    }
}

/* Return the bytes of a block that were allocated after `since`. */
static int64_t bytes_since(const Node *node, uint64_t since) {
    if (node->serial <= since) return 0;
    if (!node->older_bytes || node->older_serial > since) return node->bytes;
    return node->bytes > node->older_bytes ? node->bytes - node->older_bytes : 0;
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

void block_freed(const void *address, int number, int64_t level, int64_t reserved) {
    lock_blocks();
    Device *device = device_of(number);
    if (device && slots) {
        uint32_t slot = find((uintptr_t)address, number);
        if (slots[slot] != NONE) {
            const Node *node = &nodes[slots[slot]];
            if (moving.active) {
                moving.serial = node->older_bytes ? node->older_serial : node->serial;
                moving.bytes = node->older_bytes ? node->older_bytes : node->bytes;
            }
            if (level == UNKNOWN) level = device->level - node->bytes;
            uint32_t inside = drops_workspaces ? WORKSPACE : 0;
            if (!inside && number != CPU_DEVICE && in_operator_of(node->stack)) inside = IN_OPERATOR;
            remove_node(slot, device, inside);
        }
    }
    if (device && level != UNKNOWN) set_level(device, level, reserved);
    unlock_blocks();
}

/* Add a block that was live before counting began, or that was allocated outside torch. */
/* Return whether it was not known yet. */
EXPORT int counter_add(uintptr_t address, int64_t bytes, int number, int is_new) {
    uint32_t stack = is_new && open_regions > 0 ? current_stack() : NO_STACK;
    lock_blocks();
    Device *device = device_of(number);
    if (device && slots && slots[find(address, number)] != NONE) device = NULL; /* known already */
    if (device) {
        add_node(address, bytes, device, is_new ? ++serial : 0, stack);
        if (number == CPU_DEVICE) set_level(device, device->level + bytes, UNKNOWN);
    }
    unlock_blocks();
    return device != NULL;
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

/* With `on`, take what this thread frees for workspaces of libraries. */
EXPORT void counter_drops_workspaces(int on) { drops_workspaces = on; }

/* Return a block's serial number, or UINT64_MAX if it is not live. */
EXPORT uint64_t counter_serial_of(uintptr_t address, int number) {
    lock_blocks();
    uint32_t slot = slots ? find(address, number) : 0;
    uint64_t found = slots && slots[slot] != NONE ? nodes[slots[slot]].serial : UINT64_MAX;
    unlock_blocks();
    return found;
}

static void forget_peaks(Device *device) {
    device->peak = device->level;
    device->peak_reserved = device->reserved;
}

/* Write the address of a new region to `*opened`, where the caller finds it even if it is
   interrupted before this function's result could be stored. */
EXPORT int counter_open(int number, Region **opened) {
    Region *region = calloc(1, sizeof *region);
    if (!region) return 0;
    lock_blocks();
    region->device = device_of(number);
    if (region->device) {
        region->start_serial = region->peak_serial = serial;
        region->start_level = region->device->level;
        region->start_reserved = region->device->reserved;
        region->peak = region->sample_peak = region->device->level;
        region->peak_reserved = region->device->reserved;
        region->next = region->device->regions;
        region->device->regions = region;
        open_regions++;
        forget_peaks(region->device);
        *opened = region;
    }
    unlock_blocks();
    if (!*opened) free(region);
    return *opened != NULL;
}

EXPORT void counter_close(Region **opened) {
    Region *region = *opened;
    if (!region) return;
    lock_blocks();
    for (Region **at = &region->device->regions; *at; at = &(*at)->next)
        if (*at == region) {
            *at = region->next;
            open_regions--;
            forget_peaks(region->device);
            break;
        }
    *opened = NULL;
    unlock_blocks();
    free(region->freed);
    free(region);
}

/* Read the figures of a device and of one of its regions; `sample` starts a new sample peak, or
   without a region a new peak of the device. */
EXPORT int counter_read(int number, Region *region, int sample, Figures *out) {
    lock_blocks();
    Device *device = device_of(number);
    if (device) {
        *out = (Figures){device->level, device->reserved, device->peak, device->peak_reserved,
                         device->level, serial, serial, device->level,
                         device->reserved, lost};
        if (region) {
            out->peak = region->peak;
            out->peak_reserved = region->peak_reserved;
            out->sample_peak = region->sample_peak;
            out->start_serial = region->start_serial;
            out->start_level = region->start_level;
            out->start_reserved = region->start_reserved;
            if (sample) region->sample_peak = device->level;
        } else if (sample) {
            forget_peaks(device);
        }
    }
    unlock_blocks();
    return device != NULL;
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

/* Write what was allocated in a region and live at its peak: first the blocks that are still live,
   then those freed since, one group for each stack. Return the number written, `size` at most. */
EXPORT uint64_t counter_at_peak(const Region *region, Block *out, uint64_t size) {
    uint64_t count = 0;
    lock_blocks();
    for (uint32_t at = region->device->newest;
         at != NONE && nodes[at].serial > region->start_serial && count < size; at = nodes[at].older)
        if (nodes[at].serial <= region->peak_serial)
            out[count++] =
                (Block){nodes[at].address, nodes[at].bytes, nodes[at].serial, nodes[at].stack, 1, 0, 0};
    for (uint32_t i = 0; i < region->freed_size && count < size; i++) {
        const Freed *freed = &region->freed[i];
        if (freed->count && freed->peak_serial == region->peak_serial)
            out[count++] = (Block){0, freed->bytes, 0, freed->stack, freed->count, freed->inside, 0};
    }
    unlock_blocks();
    return count;
}

/* Return how many entries counter_at_peak can write at most. */
EXPORT uint64_t counter_at_peak_size(const Region *region) {
    lock_blocks();
    uint64_t size = (uint64_t)used + region->freed_size;
    unlock_blocks();
    return size;
}
