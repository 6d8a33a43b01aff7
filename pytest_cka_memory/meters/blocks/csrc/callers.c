/* Which Python code called a backward pass whose nodes run in another thread.

   Torch runs the nodes of an accelerator in a thread of its own, while the thread that has called
   backward() waits in torch's function that starts the engine. */
#define _GNU_SOURCE
#include "python.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define THREADS_OF_TORCH "pt_autograd" /* as torch_private.BACKWARD_THREAD */
#define MOST_SEARCHED 100

static Object engine_code; /* of torch's function that waits; the caller has a reference */
static Object own_pass;    /* of our function that runs a pass only to wait; likewise */
static __thread int kind_of_thread; /* 0: not known yet */
static __thread uint64_t device_of_thread; /* one bit, by the number at the end of its name */
static uint64_t events, active_devices;

/* Note the code of torch's Python function that starts the engine. The caller keeps the code alive. */
EXPORT void stacks_note_engine(Object code) { engine_code = code; }

/* Note the code of our function that runs backward passes only to wait. The caller keeps it alive. */
EXPORT void stacks_note_own_pass(Object code) { own_pass = code; }

/* Whether torch has created this thread to run backward passes. */
static int is_of_torch(void) {
    enum { UNKNOWN_YET, OF_TORCH, OTHER };
    if (kind_of_thread == UNKNOWN_YET) {
        char name[16] = "";
        pthread_getname_np(pthread_self(), name, sizeof name);
        size_t length = strlen(THREADS_OF_TORCH);
        kind_of_thread = strncmp(name, THREADS_OF_TORCH, length) ? OTHER : OF_TORCH;
        const char *number = name + length + 1; /* as in pt_autograd_0; negative for the CPU */
        if (kind_of_thread == OF_TORCH && *number >= '0' && *number <= '9')
            device_of_thread = (uint64_t)1 << (strtoul(number, NULL, 10) & 63);
    }
    return kind_of_thread == OF_TORCH;
}

int runs_for_another_thread(void) { return is_of_torch() && engine_code; }

/* Note that this thread has allocated or freed a block of an accelerator. */
void note_thread_of_block(void) {
    if (!is_of_torch()) return;
    __atomic_add_fetch(&events, 1, __ATOMIC_RELAXED);
    __atomic_or_fetch(&active_devices, device_of_thread, __ATOMIC_RELAXED);
}

/* Return how many blocks of accelerators torch's threads have allocated and freed, and write of which
   devices those threads are, a bit for each. */
EXPORT uint64_t callers_in_backward(uint64_t *devices) {
    *devices = __atomic_load_n(&active_devices, __ATOMIC_RELAXED);
    return __atomic_load_n(&events, __ATOMIC_RELAXED);
}

/* Return the innermost frame of torch's function that waits, if it is among the frames of a thread and
   does not wait for a pass of ours; otherwise NULL. */
static Object waiting_frame(Object frame) {
    Object waiting = NULL;
    int is_ours = 0;
    py._IncRef(frame);
    for (int i = 0; frame && !is_ours && i < MOST_SEARCHED; i++) {
        Object code = py.Frame_GetCode(frame);
        py._DecRef(code); /* the frame has a reference */
        is_ours = code == own_pass;
        if (code == engine_code && !waiting) {
            waiting = frame;
            py._IncRef(waiting);
        }
        Object back = py.Frame_GetBack(frame);
        py._DecRef(frame);
        frame = back;
    }
    if (frame) py._DecRef(frame);
    if (!waiting || !is_ours) return waiting;
    py._DecRef(waiting);
    return NULL;
}

/* Return the frame in which another thread of the user's waits for a backward pass; NULL if there is
   none, or if several wait, because torch does not tell which of them started a pass. */
Object frame_that_waits(void) {
    Object found = NULL, type, value, trace;
    py.Err_Fetch(&type, &value, &trace);
    Object function = py.Sys_GetObject("_current_frames"); /* borrowed */
    Object frames = function ? py.Object_CallObject(function, NULL) : NULL;
    Object thread, frame;
    ptrdiff_t position = 0;
    int count = 0;
    while (frames && py.Dict_Next(frames, &position, &thread, &frame)) {
        if ((pthread_t)py.Long_AsLong(thread) == pthread_self()) continue;
        Object waiting = waiting_frame(frame);
        if (!waiting) continue;
        if (count++) py._DecRef(waiting);
        else found = waiting;
    }
    if (frames) py._DecRef(frames);
    py.Err_Restore(type, value, trace);
    if (count < 2) return found;
    py._DecRef(found);
    return NULL;
}
