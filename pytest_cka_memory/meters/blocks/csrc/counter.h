/* Count allocations where torch makes them. Needs no header of torch or Python.

   hooks.c    puts functions of its own in the place of torch's calls to its allocators
   blocks.c   live blocks by address and in the order of their allocation, levels of devices
   lent.c     memory that other libraries lend to tensors, which may overlap; intervals.c: its index
   regions.c  open regions: their peaks, and what was live at them
   operators.c  which operator allocates a block, for a peak without scratch memory
   recordings.c  when blocks were allocated and freed, for regions that record it
   pinned.c   the blocks of the allocator for pinned memory of the host
   stacks.c   the Python frames of allocations
   contexts.c what ran when they were made: a module, a backward pass, an optimizer
   callers.c  which code called a backward pass that runs in another thread
   modules.c  the paths of modules in their networks, for such regions
   objects.c  all objects of some Python types, to find tensors that existed before
   walk.c     what some objects of Python lead to, to find what holds a tensor
   census.c   which objects of Python are garbage in reference cycles
   release.c  what would be freed with them, in C++ too

   All functions may be called from any thread. There is one lock for blocks and regions, one for
   pinned memory and one for stacks. No code holds two, and none calls a function of Python while it
   holds one. */
#ifndef CKA_MEMORY_COUNTER_H
#define CKA_MEMORY_COUNTER_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* The number of a device: its c10::DeviceType in the upper byte, its index in the lower. */
#define CPU_DEVICE 0
#define MAX_DEVICES 64
/* Given for a level that the allocator did not report, so that the counter adds up its own. */
#define UNKNOWN (-1)
#define NO_STACK 0
/* How a block was freed, if not by a reference of Python's that ended. */
#define IN_OPERATOR 1 /* allocated and freed while one operator ran */
#define WORKSPACE 2   /* kept by a library until its workspaces were dropped */
#define IN_BACKWARD 3 /* by a backward pass, which had the last reference */
#define WITH_GRAPH 4  /* with a tensor of Python's that had the last reference to a graph */
#define WAYS_OF_FREEING 5
#define MAX_FRAMES 6
/* What ran when a block was allocated; the others are numbers that Python chooses. */
#define NO_CONTEXT 0
#define BACKWARD 1

typedef struct {
    uintptr_t address;
    int64_t bytes;
    uint64_t serial; /* its number in the order of all allocations, from 1; 0: live before counting began */
    uint32_t stack;  /* where it was allocated; NO_STACK if unknown */
    uint32_t count;  /* 1, or the number of blocks in a group of the same stack */
    uint32_t freed; /* how it was freed: IN_OPERATOR, WORKSPACE, IN_BACKWARD, WITH_GRAPH or 0 */
    uint32_t unused;
} Block;

typedef struct {
    int64_t level;
    int64_t reserved; /* UNKNOWN on the CPU */
    int64_t peak;     /* since the region began; without a region, since one last began or ended */
    int64_t peak_reserved;
    int64_t sample_peak; /* highest level since the region was last sampled */
    uint64_t serial;     /* number of allocations so far, on all devices */
    uint64_t start_serial; /* this and the next two: when the region began */
    int64_t start_level;
    int64_t start_reserved;
    int64_t lost; /* allocations that could not be recorded because memory ran out */
    int64_t collected; /* allocated in the region and freed by the garbage collector */
} Figures;

typedef struct Region Region;

/* c10::DataPtr, of which libstdc++ stores the freeing function before the context. */
typedef struct {
    void *data;
    void (*free)(void *);
    void *context;
    int8_t device_type, device_index;
} DataPtr;

typedef DataPtr (*PinnedAllocate)(void *allocator, size_t bytes);

/* blocks.c */
void block_allocated(const void *address, int64_t bytes, int device, int64_t level, int64_t reserved);
void block_freed(const void *address, int device, int64_t level, int64_t reserved);
void move_begins(void);
void move_ends(void);
void counter_inherit(uintptr_t address, int device, uint64_t older_serial, int64_t bytes);
void lock_blocks(void);
void unlock_blocks(void);

/* regions.c */
int any_region_open(void);

/* recordings.c */
int any_recording(void);

/* operators.c */
void find_operators(const char *path);
void watch_operators(int by);

/* pinned.c */
extern PinnedAllocate real_pinned_allocate;
extern uintptr_t pinned_code_start, pinned_code_end; /* of the library that has the allocator */
DataPtr counted_pinned_allocate(void *allocator, size_t bytes);
void lock_pinned(void);
void unlock_pinned(void);

/* stacks.c */
uint32_t current_stack(void);
void note_stack(void);
void note_operator(void);
uint32_t take_stack(void);
void find_emulated_device(void);
int in_operator_of(uint32_t stack);
int is_device_emulated(void);
void lock_stacks(void);
void unlock_stacks(void);

/* contexts.c */
uint32_t context_of(const void *code);
void find_graph_task(const char *path);
int backward_pass(void);
int is_in_backward(void);
void lock_is_released(const void *frame);
void lock_is_taken(const void *frame);
void note_allocation(void);
int frees_graph(void);

/* callers.c */
void note_thread_of_block(void);

/* For lists of Python's functions, which are found by their names: X(type, name, arguments). */
#define FUNCTION_FIELD(type, name, arguments) type (*name) arguments;
#define FUNCTION_NAME(type, name, arguments) "Py" #name,

/* stacks.c: returns 0 if one is missing. */
int find_functions(void **functions, const char *const *names, size_t count);

#endif
