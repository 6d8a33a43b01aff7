/* What runs when a block is allocated or freed: a module, a backward pass, the step of an optimizer.

   Python names the code objects of torch that say so; the innermost frame of one of them counts. Whether
   a thread runs a backward pass is asked of torch, because the threads for accelerators have no frames. */
#define _GNU_SOURCE
#include "counter.h"

#include <dlfcn.h>

#define MOST_CONTEXTS 1024

static struct {
    void *code; /* the caller has a reference */
    uint32_t context;
} contexts[MOST_CONTEXTS];
static int count;
/* torch::autograd::get_current_graph_task_id: -1 unless this thread runs nodes of a backward pass. */
static int (*graph_task)(void);

/* Note in which context what is called by `code` allocates. The caller keeps the code alive. */
EXPORT int stacks_note_context(void *code, uint32_t context) {
    lock_stacks();
    int fits = count < MOST_CONTEXTS;
    if (fits) {
        contexts[count].code = code;
        contexts[count++].context = context;
    }
    unlock_stacks();
    return fits;
}

/* Return the context of a code object. Called while the lock of stacks is held. */
uint32_t context_of(const void *code) {
    for (int i = 0; i < count; i++)
        if (contexts[i].code == code) return contexts[i].context;
    return NO_CONTEXT;
}

/* Find the function of torch, whose library has this path. */
void find_graph_task(const char *path) {
    void *torch = *path ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (!torch) return;
    *(void **)&graph_task = dlsym(torch, "_ZN5torch8autograd25get_current_graph_task_idEv");
    dlclose(torch);
}

/* Return the number of the backward pass whose nodes this thread runs, -1 if it runs none. */
int backward_pass(void) { return graph_task ? graph_task() : -1; }

/* Whether this thread runs nodes of a backward pass. */
int is_in_backward(void) { return backward_pass() != -1; }

/* A tensor of Python's is freed while the interpreter's lock is released, and with it the graph that
   only it referenced. To free what was Python's in that graph, torch takes the lock and releases it
   again, deeper in the stack. */
#define OF_ONE_FUNCTION 256 /* bytes of the stack; a nested release is farther away */
static __thread uintptr_t released_at; /* where the outermost release was called; 0 if there is none */
static __thread int allocates, frees;  /* whether this thread has done so since */

/* Note that this thread releases the lock; `frame` is the address of a frame of the stack, which grows
   downwards. */
void lock_is_released(const void *frame) {
    if ((uintptr_t)frame < released_at) return;
    released_at = (uintptr_t)frame;
    allocates = frees = 0;
}

void lock_is_taken(const void *frame) {
    if ((uintptr_t)frame + OF_ONE_FUNCTION >= released_at) released_at = 0;
}

void note_allocation(void) { allocates = 1; }

/* Note that this thread frees a block of a tensor; return whether the one before was of its graph. */
int frees_graph(void) {
    int is_second = released_at && !allocates && frees;
    frees = released_at != 0;
    return is_second;
}
