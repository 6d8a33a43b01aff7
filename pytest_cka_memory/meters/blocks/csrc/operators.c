/* Which operator of torch allocates a block, to count a peak without the scratch memory of kernels.

   torch calls two functions around each operator of a thread while they are registered as a callback
   (at::RecordFunction). What an operator allocates is pending until it ends; what it frees before was
   scratch memory. How much of that a kernel needs depends on the number of threads and on the
   instruction set. Factories such as aten::empty only allocate for the operator that calls them, and
   what they allocate for the caller of all operators is not pending. Nor is a buffer of compiled code. */
#define _GNU_SOURCE
#include "blocks.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

/* at::RecordFunctionCallback, from torch 2.9 on at least. */
typedef struct {
    void *begins, *ends;
    double sampling_probability;
    uint8_t scopes[10], needs_inputs, needs_outputs, needs_ids;
} Callback;
#define OPERATORS 0 /* at::RecordScope::FUNCTION */

typedef struct {
    uint64_t number; /* of this call of an operator */
    int64_t pending; /* bytes that it has allocated and not freed */
    int passes_on;
} Running;

#define MOST_NESTED 64
static __thread Running running[MOST_NESTED];
static __thread int depth; /* of the operators that this thread runs; may be more than MOST_NESTED */
static uint64_t calls;
static const char *(*name_of)(const void *record);
static uint64_t (*add_callback)(Callback);
static void (*remove_callback)(uint64_t);
/* std::optional<at::StepCallbacks>, of some 120 bytes; only its size matters. */
typedef struct {
    char bytes[1024];
} StepCallbacks;
static StepCallbacks (*read_callbacks)(uint8_t scope);
static pthread_mutex_t watching = PTHREAD_MUTEX_INITIALIZER;
static int watchers; /* open regions of the CPU */
static uint64_t added;

/* Operators that only allocate what the operator around them needs, or copy it. */
static const char *const factories[] = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like",
    "new_full", "arange", "resize_", "to", "_to_copy", "clone", "contiguous",
};

/* Whether what is allocated belongs to the operator around this call, if there is one. A name without a
   namespace is no operator's, but that of compiled code or of another range. */
static int passes_on(const char *name) {
    if (strncmp(name, "aten::", 6)) return !strstr(name, "::");
    const char *own = name + 6;
    for (size_t i = 0; i < sizeof factories / sizeof *factories; i++)
        if (*own == *factories[i] && !strcmp(own, factories[i])) return 1;
    return 0;
}

static void operator_begins(const void *record) {
    if (depth < MOST_NESTED)
        running[depth] = (Running){__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED), 0,
                                   passes_on(name_of(record))};
    depth++;
}

/* What it has not freed counts from now on. */
static void operator_ends(const void *record, void *context) {
    (void)record, (void)context;
    if (!depth || --depth >= MOST_NESTED || !running[depth].pending) return;
    lock_blocks();
    Device *device = device_of(CPU_DEVICE);
    device->pending -= running[depth].pending;
    raise_peaks(device);
    unlock_blocks();
}

/* torch gets a std::unique_ptr from the first function, which is returned in memory of the caller. */
#if defined(__x86_64__)
static void *begins(void **context, const void *record) {
    *context = NULL;
    operator_begins(record);
    return context;
}
#define BEGINS ((void *)begins)
#elif defined(__aarch64__) /* written from the ABI's description; never run */
__attribute__((used)) static void begins_here(const void *record) { operator_begins(record); }
__asm__(".text\n_cka_begins:\n str xzr, [x8]\n b begins_here\n");
extern char _cka_begins[] __attribute__((visibility("hidden")));
#define BEGINS ((void *)_cka_begins)
#else
#define NO_BEGINS
#define BEGINS NULL
#endif

/* Find the functions of torch, whose library has the given path. */
void find_operators(const char *path) {
#ifndef NO_BEGINS
    void *torch = *path ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (!torch) return;
    *(void **)&name_of = dlsym(torch, "_ZNK2at14RecordFunction4nameEv");
    *(void **)&remove_callback = dlsym(torch, "_ZN2at14removeCallbackEm");
    *(void **)&read_callbacks = dlsym(torch, "_ZN2at27getStepCallbacksUnlessEmptyENS_11RecordScopeE");
    void *add = dlsym(torch, "_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE");
    if (name_of && remove_callback) *(void **)&add_callback = add;
    dlclose(torch);
#else
    (void)path;
#endif
}

/* Whether scratch memory is told apart: an operator was noted, so that torch calls the functions. */
EXPORT int counter_knows_scratch(void) { return calls > 0; }

/* A region of the CPU begins (1) or ends (-1). Operators are noted only while one is open, because each
   of them then takes longer (docs/explanation/cost.md). The caller holds no lock; threads may have no
   common one. */
void watch_operators(int by) {
    if (!add_callback) return;
    pthread_mutex_lock(&watching);
    int before = watchers;
    watchers += by;
    if (!before && watchers) {
        Callback callback = {BEGINS, (void *)operator_ends, 1.0, {0}, 0, 0, 0};
        callback.scopes[OPERATORS] = 1;
        added = add_callback(callback);
    } else if (before && !watchers) {
        remove_callback(added);
    }
    pthread_mutex_unlock(&watching);
    /* Each thread reads the callbacks anew at its first operator after a change, under a lock of torch. A
       child that is forked while another thread does so would wait for it for ever; so this thread, which
       may fork, reads them here. */
    if (read_callbacks) (void)read_callbacks(OPERATORS);
}

/* Note which operator allocates a block. The lock of blocks is held here and below. */
void block_is_pending(Node *node, Device *device) {
    for (int at = depth < MOST_NESTED ? depth : MOST_NESTED; at-- > 0;) {
        if (running[at].passes_on) continue;
        node->operator_call = running[at].number;
        running[at].pending += node->bytes;
        device->pending += node->bytes;
        return;
    }
}

/* A block that another thread's operator has allocated stays pending until that operator ends. */
void block_was_pending(const Node *node, Device *device) {
    if (!node->operator_call) return;
    for (int at = depth < MOST_NESTED ? depth : MOST_NESTED; at-- > 0;) {
        if (running[at].number != node->operator_call) continue;
        running[at].pending -= node->bytes;
        device->pending -= node->bytes;
        return;
    }
}
