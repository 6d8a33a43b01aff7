/* Open regions: their peaks, and what was live at them. */
#include "blocks.h"

#include <stdlib.h>
#include <string.h>

/* What was live at a region's peak and has been freed since, of one stack. */
typedef struct {
    uint64_t peak_serial; /* the peak for which the rest was counted */
    int64_t bytes;
    uint32_t count, stack, freed;
} Freed;

struct Region {
    Region *next;
    Device *device;
    uint64_t start_serial, peak_serial;
    int64_t start_level, start_reserved;
    int64_t peak, peak_reserved, sample_peak;
    int64_t collected;
    int64_t without_scratch; /* highest level without the scratch memory of operators */
    Freed *freed; /* by the number of the stack, without its generation, and by how it was freed */
    uint32_t freed_size;
    Recording *recording; /* NULL unless it was asked for */
};

static int open_regions; /* written under the lock, and read without it at each allocation */

EXPORT int counter_open_regions(void) { return __atomic_load_n(&open_regions, __ATOMIC_RELAXED); }
int any_region_open(void) { return counter_open_regions() > 0; }

/* Raise the peaks of a device's regions to its levels. */
void raise_peaks(const Device *device) {
    for (Region *region = device->regions; region; region = region->next) {
        if (device->level > region->peak) {
            region->peak = device->level;
            region->peak_serial = allocation_count;
            if (region->recording) note_peak(region->recording);
        }
        int64_t without_scratch = device->level - device->pending;
        if (without_scratch > region->without_scratch) region->without_scratch = without_scratch;
        if (device->level > region->sample_peak) region->sample_peak = device->level;
        if (device->reserved > region->peak_reserved) region->peak_reserved = device->reserved;
    }
}

/* Whether a block was allocated in a region and live at its peak. */
static int was_at_peak(const Node *node, const Region *region) {
    return node->serial > region->start_serial && node->serial <= region->peak_serial;
}

/* Return where a region counts what was freed in one way from one stack; NULL if there is no memory. */
static Freed *freed_in(Region *region, uint32_t stack, uint32_t how) {
    uint32_t at = WAYS_OF_FREEING * (stack & 0xffff) + how;
    if (at >= region->freed_size) {
        uint32_t size = 2 * at + 64;
        Freed *more = realloc(region->freed, size * sizeof *more);
        if (!more) return NULL;
        memset(more + region->freed_size, 0, (size - region->freed_size) * sizeof *more);
        region->freed = more;
        region->freed_size = size;
    }
    Freed *freed = &region->freed[at];
    if (freed->peak_serial != region->peak_serial)
        *freed = (Freed){region->peak_serial, 0, 0, stack, how};
    return freed;
}

static void add_freed(Region *region, const Node *node, uint32_t how) {
    Freed *freed = freed_in(region, node->stack, how);
    if (!freed) {
        lost_allocations++;
        return;
    }
    freed->bytes += node->bytes;
    freed->count++;
}

/* Remember that a block was live at the peaks of the open regions, and how it was freed. */
void note_freed(const Node *node, const Device *device, uint32_t how) {
    for (Region *region = device->regions; region; region = region->next)
        if (was_at_peak(node, region)) add_freed(region, node, how);
}

/* Count a block as freed with a graph, which note_freed() has just counted in another way. */
void note_freed_with_graph(const Node *node, const Device *device) {
    for (Region *region = device->regions; region; region = region->next) {
        Freed *freed = was_at_peak(node, region) ? freed_in(region, node->stack, 0) : NULL;
        if (!freed || !freed->count) continue;
        freed->bytes -= node->bytes;
        freed->count--;
        add_freed(region, node, WITH_GRAPH);
    }
}

/* Add a block that the garbage collector frees to the regions in which it was allocated. */
void note_collected(const Node *node, const Device *device) {
    for (Region *region = device->regions; region; region = region->next)
        region->collected += bytes_since(node, region->start_serial);
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
        region->start_serial = region->peak_serial = allocation_count;
        region->start_level = region->device->level;
        region->start_reserved = region->device->reserved;
        region->peak = region->sample_peak = region->device->level;
        region->without_scratch = region->device->level - region->device->pending;
        region->peak_reserved = region->device->reserved;
        region->next = region->device->regions;
        region->device->regions = region;
        __atomic_add_fetch(&open_regions, 1, __ATOMIC_RELAXED);
        forget_peaks(region->device);
        *opened = region;
    }
    unlock_blocks();
    if (!*opened) free(region);
    else if (number == CPU_DEVICE) watch_operators(1);
    return *opened != NULL;
}

EXPORT void counter_close(Region **opened) {
    Region *region = *opened;
    if (!region) return;
    lock_blocks();
    for (Region **at = &region->device->regions; *at; at = &(*at)->next)
        if (*at == region) {
            *at = region->next;
            __atomic_sub_fetch(&open_regions, 1, __ATOMIC_RELAXED);
            forget_peaks(region->device);
            break;
        }
    if (region->recording) stop_recording(region->recording);
    *opened = NULL;
    unlock_blocks();
    if (region->device->number == CPU_DEVICE) watch_operators(-1);
    free_recording(region->recording);
    free(region->freed);
    free(region);
}

/* Return the highest level of a region of the CPU without the scratch memory of operators. */
EXPORT int64_t counter_without_scratch(const Region *region) {
    lock_blocks();
    int64_t level = region->without_scratch;
    unlock_blocks();
    return level;
}

/* Record from now on when blocks are allocated and freed, `most` blocks at most. */
EXPORT int counter_record(Region *region, uint32_t most) {
    lock_blocks();
    if (!region->recording) region->recording = new_recording(region->device->number, most);
    int records = region->recording != NULL;
    unlock_blocks();
    return records;
}

/* Stop recording and return what was recorded, which is valid until the region is closed. */
EXPORT int counter_recorded(Region *region, Recorded *out) {
    lock_blocks();
    Recording *recording = region->recording;
    if (recording) {
        stop_recording(recording);
        read_recording(recording, out);
    }
    unlock_blocks();
    return recording != NULL;
}

/* Read the figures of a device and of one of its regions; `sample` starts a new sample peak, or
   without a region a new peak of the device. */
EXPORT int counter_read(int number, Region *region, int sample, Figures *out) {
    lock_blocks();
    Device *device = device_of(number);
    if (device) {
        *out = (Figures){device->level, device->reserved, device->peak, device->peak_reserved,
                         device->level, allocation_count, allocation_count, device->level,
                         device->reserved, lost_allocations, 0};
        if (region) {
            out->peak = region->peak;
            out->peak_reserved = region->peak_reserved;
            out->sample_peak = region->sample_peak;
            out->start_serial = region->start_serial;
            out->start_level = region->start_level;
            out->start_reserved = region->start_reserved;
            out->collected = region->collected;
            if (sample) region->sample_peak = device->level;
        } else if (sample) {
            forget_peaks(device);
        }
    }
    unlock_blocks();
    return device != NULL;
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
            out[count++] = (Block){0, freed->bytes, 0, freed->stack, freed->count, freed->freed, 0};
    }
    unlock_blocks();
    return count;
}

/* Return how many entries counter_at_peak can write at most. */
EXPORT uint64_t counter_at_peak_size(const Region *region) {
    lock_blocks();
    uint64_t size = (uint64_t)blocks_in_use() + region->freed_size;
    unlock_blocks();
    return size;
}
