/* What a region records if it is asked to: when each block was allocated and when it was freed.

   Time is the number of an event, from 1. The blocks of the region's device are recorded, and those of
   the host beside it. If there are too many, small blocks that were freed soon are merged. */
#include "blocks.h"

#include <stdlib.h>
#include <string.h>

#define WINDOWS 256
#define LEAST_MERGED 4096   /* bytes: blocks up to this size are merged first */
#define KEYS (0x10000 * WAYS_OF_FREEING * 2) /* stack, way of freeing, host or device */

typedef struct {
    int64_t bytes;   /* of merged blocks: what they had on average */
    uint32_t serial; /* since the recording began; that of the last allocation for an older block */
    uint32_t from;   /* number of the event; 0 for a block that is older than the recording */
    uint32_t until;  /* 0 if it is still live */
    uint32_t stack;
    uint32_t count; /* how many were merged into it, or 1 */
    uint16_t on_host;
    uint16_t freed; /* how, as counter.h numbers it */
} RecordedBlock;

struct Recording {
    Recording *next;
    int device;
    uint64_t start_serial;
    RecordedBlock *blocks; /* in the order of their allocation, older ones when they were freed */
    uint32_t count, size, most;
    uint32_t events, peak_event;
    uint32_t merged; /* how many allocations were merged with others */
    uint64_t lost;   /* how many could not be recorded */
    int64_t merged_bytes; /* no merged block is larger than this */
    int64_t host_start_level;
};

struct Recorded {
    const RecordedBlock *blocks;
    uint32_t count, events, peak_event, merged;
    uint64_t lost;
    int64_t merged_bytes, host_start_level;
};

static Recording *recordings; /* written under the lock of blocks */

/* May be called without the lock. */
int any_recording(void) { return __atomic_load_n(&recordings, __ATOMIC_RELAXED) != NULL; }

static uint32_t window_of(const Recording *recording, uint32_t event) {
    return (uint32_t)((uint64_t)event * WINDOWS / (recording->events + 1u));
}

/* Whether a block was freed in the same window in which it was allocated, and not live at the peak. */
static int is_short_lived(const Recording *recording, const RecordedBlock *block) {
    if (!block->from || !block->until) return 0;
    if (block->from <= recording->peak_event && recording->peak_event < block->until) return 0;
    return window_of(recording, block->from) == window_of(recording, block->until);
}

typedef struct {
    double area; /* bytes times events */
    uint32_t at, window; /* of the block that stands for the group; the window counts from 1 */
} Group;

/* Replace short-lived blocks up to `merged_bytes` by one for each stack and window. Before and after
   the peak they are separate, because a merged block must not seem to be live at the peak. */
static void merge_small(Recording *recording, Group *groups) {
    uint32_t kept = 0;
    memset(groups, 0, KEYS * sizeof *groups);
    for (uint32_t i = 0; i < recording->count; i++) {
        RecordedBlock block = recording->blocks[i];
        if (block.bytes > recording->merged_bytes || !is_short_lived(recording, &block)) {
            recording->blocks[kept++] = block;
            continue;
        }
        uint32_t window =
            2 * window_of(recording, block.from) + 1 + (block.from > recording->peak_event);
        Group *group = &groups[2 * (WAYS_OF_FREEING * (block.stack & 0xffff) + block.freed) +
                               block.on_host];
        double area = (double)block.bytes * (block.until - block.from);
        if (group->window != window) {
            *group = (Group){area, kept, window};
            recording->blocks[kept++] = block;
            continue;
        }
        RecordedBlock *into = &recording->blocks[group->at];
        recording->merged += (block.count == 1) + (into->count == 1);
        group->area += area;
        into->count += block.count;
        if (block.until > into->until) into->until = block.until;
        into->bytes = (int64_t)(group->area / (into->until - into->from));
    }
    recording->count = kept;
}

static int make_room(Recording *recording) {
    if (recording->count < recording->size) return 1;
    if (recording->size < recording->most) {
        uint32_t size = recording->size ? 2 * recording->size : 1024;
        if (size > recording->most) size = recording->most;
        RecordedBlock *more = realloc(recording->blocks, size * sizeof *more);
        if (!more) return 0;
        recording->blocks = more;
        recording->size = size;
        return 1;
    }
    Group *groups = malloc(KEYS * sizeof *groups);
    if (!groups) return 0;
    uint32_t enough = recording->most - recording->most / 4;
    for (;;) {
        merge_small(recording, groups);
        if (recording->count <= enough || recording->merged_bytes > INT64_MAX / 16) break;
        recording->merged_bytes *= 16;
    }
    free(groups);
    return recording->count < recording->size;
}

static RecordedBlock *add(Recording *recording) {
    if (!make_room(recording)) {
        recording->lost++;
        return NULL;
    }
    return &recording->blocks[recording->count++];
}

/* To compute values, an emulated device allocates much on the host that the user's code would not. */
static int is_recorded(const Recording *recording, int device) {
    return device == recording->device || (device == CPU_DEVICE && !is_device_emulated());
}

void record_allocated(const Node *node) {
    for (Recording *recording = recordings; recording; recording = recording->next) {
        if (!is_recorded(recording, node->device)) continue;
        int on_host = node->device != recording->device;
        RecordedBlock *block = add(recording);
        if (!block) continue;
        uint32_t serial = (uint32_t)(allocation_count - recording->start_serial);
        *block = (RecordedBlock){node->bytes, serial, ++recording->events, 0,
                                 node->stack, 1, (uint16_t)on_host, 0};
    }
}

/* Return the first block with a serial number, or a higher one; `count` if there is none. */
static uint32_t first_from(const Recording *recording, uint32_t serial) {
    uint32_t low = 0, high = recording->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (recording->blocks[middle].serial < serial) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Return what was recorded of a live block; NULL if it was lost. The parts of one that was split have
   the same serial number. */
static RecordedBlock *find_live(const Recording *recording, const Node *node) {
    uint32_t serial = (uint32_t)(node->serial - recording->start_serial);
    for (uint32_t at = first_from(recording, serial); at < recording->count; at++) {
        RecordedBlock *block = &recording->blocks[at];
        if (block->serial != serial) break;
        int is_live = block->from && !block->until;
        if (is_live && block->bytes == node->bytes && block->stack == node->stack) return block;
    }
    return NULL;
}

void record_freed(const Node *node, uint32_t freed) {
    for (Recording *recording = recordings; recording; recording = recording->next) {
        if (!is_recorded(recording, node->device)) continue;
        uint16_t on_host = node->device != recording->device;
        if (node->serial <= recording->start_serial) {
            RecordedBlock *older = add(recording);
            uint32_t last = (uint32_t)(allocation_count - recording->start_serial);
            if (older)
                *older = (RecordedBlock){node->bytes, last, 0, ++recording->events,
                                         NO_STACK, 1, on_host, 0};
            continue;
        }
        RecordedBlock *block = find_live(recording, node);
        if (!block) continue;
        block->until = ++recording->events;
        block->freed = (uint16_t)freed;
    }
}

/* Record that a block is divided in two, and that its second part has so many bytes. */
void record_split(const Node *node, int64_t bytes) {
    for (Recording *recording = recordings; recording; recording = recording->next) {
        if (!is_recorded(recording, node->device) || node->serial <= recording->start_serial) continue;
        RecordedBlock *last = find_live(recording, node) ? add(recording) : NULL;
        if (!last) continue;
        last->serial = UINT32_MAX; /* in order until it is overwritten */
        /* Looked up again, because adding may have merged others. */
        RecordedBlock *block = find_live(recording, node);
        memmove(block + 1, block, (size_t)(last - block) * sizeof *block);
        block[1].bytes = bytes;
        block[0].bytes -= bytes;
    }
}

void note_peak(Recording *recording) { recording->peak_event = recording->events; }

Recording *new_recording(int device, uint32_t most) {
    Recording *recording = calloc(1, sizeof *recording);
    if (!recording) return NULL;
    *recording = (Recording){.next = recordings, .device = device, .most = most};
    recording->start_serial = allocation_count;
    recording->merged_bytes = LEAST_MERGED;
    const Device *host = device_of(CPU_DEVICE);
    recording->host_start_level = host && device != CPU_DEVICE ? host->level : 0;
    __atomic_store_n(&recordings, recording, __ATOMIC_RELAXED);
    return recording;
}

void stop_recording(const Recording *recording) {
    for (Recording **at = &recordings; *at; at = &(*at)->next)
        if (*at == recording) {
            __atomic_store_n(at, recording->next, __ATOMIC_RELAXED);
            break;
        }
}

void free_recording(Recording *recording) {
    if (recording) free(recording->blocks);
    free(recording);
}

void read_recording(const Recording *recording, Recorded *out) {
    *out = (Recorded){
        recording->blocks,     recording->count, recording->events,       recording->peak_event,
        recording->merged,     recording->lost,  recording->merged_bytes, recording->host_start_level};
}
