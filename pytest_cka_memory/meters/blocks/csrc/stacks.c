/* The Python frames of allocations, by the functions of Python's stable API, found at run time.

   A frame is a code object and the index of its last instruction. Equal stacks are stored once, and
   their code objects are referenced, until the last open region ends. */
#define _GNU_SOURCE
#include "python.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MOST_SEARCHED 100
#define MOST_STACKS 65535u /* so that a stack's number leaves 16 bits for its generation */
#define MOST_CODES 65535u
#define MOST_PREFIXES 32

struct PythonFunctions py;
static int (*is_finalizing)(void);
static int (*frame_lasti)(Object); /* Python 3.10 has no function for it, only the attribute */
static int locals_in_frame; /* up to Python 3.10 a frame object has the local variables itself */
static int collects_at_allocations; /* up to Python 3.11 a new frame object may start a collection */

enum { USER, FOREIGN, END };

typedef struct {
    Object code; /* owned */
    uint64_t file;
    int kind;
    uint32_t context; /* in which what it calls allocates; 0 if that is not known */
} Code;

typedef struct {
    uint32_t codes[MAX_FRAMES];
    int last[MAX_FRAMES];
    int count;
    uint32_t context; /* of the innermost code that has one */
    uint64_t module; /* identity of the innermost running module of torch.nn; 0 if there is none */
} Stack;

/* Equal items get the same number, from 1. */
typedef struct {
    size_t item_size, key_size; /* an item begins with its key */
    uint32_t most;
    char *items;
    uint32_t used, size;
    uint32_t *slots; /* open addressing: hash -> number; twice as many as items */
} Table;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Table codes = {sizeof(Code), sizeof(Object), MOST_CODES, NULL, 0, 0, NULL};
static Table stacks = {sizeof(Stack), sizeof(Stack), MOST_STACKS, NULL, 0, 0, NULL};
static uint32_t generation; /* changes when the tables are emptied */
static char *prefixes[MOST_PREFIXES];
static int prefix_kinds[MOST_PREFIXES], prefix_count;
static int ready; /* whether the functions of Python are known; written once, read without a lock */
/* The code of torch.nn.Module.__call__, whose first local is the module, and where that local is in
   an interpreter frame. Found by a trial, because Python has no function for it that copies no locals. */
static Object module_code;
static size_t first_local;
static __thread int inside;
/* Of this thread: the stack of its next allocation, that of its last, and in which operator it was. */
static __thread uint32_t noted, last_taken, last_operator, operator_number;
static __thread int has_frames; /* whether the stack that was found last has any of this thread */

static int is_ready(void) { return __atomic_load_n(&ready, __ATOMIC_ACQUIRE); }
void lock_stacks(void) { pthread_mutex_lock(&lock); }
void unlock_stacks(void) { pthread_mutex_unlock(&lock); }

static int lasti_attribute(Object frame) {
    Object number = py.Object_GetAttrString(frame, "f_lasti");
    int last = number ? (int)py.Long_AsLong(number) : -1;
    if (number) py._DecRef(number);
    return last;
}

int find_functions(void **functions, const char *const *names, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!(functions[i] = dlsym(RTLD_DEFAULT, names[i]))) return 0;
    return 1;
}

EXPORT int stacks_prepare(void) {
    static const char *const names[] = {PYTHON(FUNCTION_NAME)};
    if (!find_functions((void **)&py, names, sizeof names / sizeof *names)) return 0;
    *(void **)&is_finalizing = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    if (!is_finalizing) *(void **)&is_finalizing = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    const char *(*version)(void);
    *(void **)&version = dlsym(RTLD_DEFAULT, "Py_GetVersion");
    int minor = version ? atoi(version() + 2) : 0;
    collects_at_allocations = minor < 12;
    locals_in_frame = minor < 11;
    *(void **)&frame_lasti = dlsym(RTLD_DEFAULT, "PyFrame_GetLasti");
    if (!frame_lasti) frame_lasti = lasti_attribute;
    __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
    return 1;
}

/* Leave out the frames of files whose names begin so; with `ends`, also all that called them. */
EXPORT int stacks_leave_out(const char *prefix, int ends) {
    lock_stacks();
    int fits = prefix_count < MOST_PREFIXES;
    if (fits) {
        prefixes[prefix_count] = strdup(prefix);
        prefix_kinds[prefix_count++] = ends ? END : FOREIGN;
    }
    unlock_stacks();
    return fits;
}

static uint64_t hash_of(const void *data, size_t size) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return hash;
}

static int kind_of(const char *file) {
    for (int i = 0; i < prefix_count; i++)
        if (!strncmp(file, prefixes[i], strlen(prefixes[i]))) return prefix_kinds[i];
    return USER;
}

/* The same for a key, which is a whole number of words: one step for eight bytes. */
static uint64_t hash_of_key(const void *key, size_t size) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, (const char *)key + i, sizeof word);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return hash;
}

static void *item_at(const Table *table, uint32_t number) {
    return table->items + (size_t)(number - 1) * table->item_size;
}

static uint32_t *slot_for(const Table *table, const void *key) {
    uint32_t at = (uint32_t)(hash_of_key(key, table->key_size) >> 32) & (2 * table->size - 1);
    while (table->slots[at] && memcmp(item_at(table, table->slots[at]), key, table->key_size))
        at = (at + 1) & (2 * table->size - 1);
    return &table->slots[at];
}

static int make_room(Table *table) {
    if (table->used >= table->most) return 0;
    if (table->used < table->size) return 1;
    uint32_t size = table->size ? 2 * table->size : 256;
    char *items = realloc(table->items, size * table->item_size);
    if (!items) return 0;
    table->items = items;
    uint32_t *slots = calloc(2 * (size_t)size, sizeof *slots);
    if (!slots) return 0;
    free(table->slots);
    table->slots = slots;
    table->size = size;
    for (uint32_t number = 1; number <= table->used; number++)
        *slot_for(table, item_at(table, number)) = number;
    return 1;
}

/* Return the number of an item, which is added if it is new; 0 if there is no room for it. */
static uint32_t number_of(Table *table, const void *item, int *is_new) {
    *is_new = 0;
    uint32_t known = table->size ? *slot_for(table, item) : 0;
    if (known || !make_room(table)) return known;
    uint32_t *slot = slot_for(table, item);
    *is_new = 1;
    *slot = ++table->used;
    memcpy(item_at(table, *slot), item, table->item_size);
    return *slot;
}

static void empty(Table *table) {
    if (table->slots) memset(table->slots, 0, 2 * (size_t)table->size * sizeof *table->slots);
    table->used = 0;
}

/* Return the number of a code object and describe it; takes over one reference to it.

   No function of Python is called while the lock is held: in a free-threaded interpreter such a call
   may suspend the thread until all others are suspended, also one that waits for the lock. */
static uint32_t number_of_code(Object object, Code *code) {
    int is_new = 0;
    lock_stacks();
    uint32_t number = codes.size ? *slot_for(&codes, &object) : 0;
    if (number) *code = *(Code *)item_at(&codes, number);
    unlock_stacks();
    if (!number) {
        Object type, value, trace;
        py.Err_Fetch(&type, &value, &trace);
        Object name = py.Object_GetAttrString(object, "co_filename");
        ptrdiff_t size = 0;
        const char *file = name ? py.Unicode_AsUTF8AndSize(name, &size) : NULL;
        *code = (Code){object, file ? hash_of(file, (size_t)size) : 0, USER, NO_CONTEXT};
        lock_stacks();
        code->context = context_of(object);
        if (file) code->kind = kind_of(file);
        number = number_of(&codes, code, &is_new);
        unlock_stacks();
        if (name) py._DecRef(name);
        py.Err_Restore(type, value, trace);
    }
    if (!is_new) py._DecRef(object); /* the table has a reference of its own */
    return number;
}

/* The identity of a local variable. In CPython 3.10 a frame object has its locals after its stack of
   blocks, at byte 352. In CPython 3.11 to 3.14 it has a pointer to its interpreter frame after its head
   and its caller. The lowest bits of a local may be a tag. */
static uint64_t local_at(Object frame, size_t offset) {
    const char *interpreter_frame = locals_in_frame ? frame : ((char **)frame)[3];
    return interpreter_frame ? *(const uint64_t *)(interpreter_frame + offset) & ~(uint64_t)7 : 0;
}

/* Return the module that a frame of torch.nn.Module.__call__ runs, borrowed; NULL for others. */
Object module_of_frame(Object frame) {
    Object code = py.Frame_GetCode(frame);
    int is_call = code == module_code && first_local;
    py._DecRef(code);
    return is_call ? (Object)local_at(frame, first_local) : NULL;
}

/* Note the module of each stack from now on. Called by a Python function whose first local is `first`;
   `code` is the code of torch.nn.Module.__call__. Returns whether the local was found. */
EXPORT int stacks_note_modules(Object code, uint64_t first) {
    Object frame = py.ThreadState_GetFrame(py.ThreadState_Get());
    size_t found = 0;
    size_t from = locals_in_frame ? 352 : 64, to = locals_in_frame ? 352 : 96;
    for (size_t offset = from; frame && offset <= to && !found; offset += 8)
        if (local_at(frame, offset) == first) found = offset;
    if (frame) py._DecRef(frame);
    lock_stacks();
    first_local = found;
    module_code = found ? code : NULL;
    unlock_stacks();
    return found != 0;
}

/* Return the number of a stack; NO_STACK if it says nothing, or if the last region has ended since
   `began`, so that the numbers of codes have lost their meaning. */
static uint32_t number_of_stack(const Stack *stack, uint32_t began) {
    int is_new = 0;
    lock_stacks();
    int is_known = (stack->count || stack->context) && generation == began;
    uint32_t number = is_known ? number_of(&stacks, stack, &is_new) : 0;
    unlock_stacks();
    has_frames = stack->count > 0;
    if (is_new && stack->module && any_recording()) name_module((Object)stack->module);
    return number ? began << 16 | number : NO_STACK;
}

/* Return the stack of a thread without Python: whether it runs a backward pass. */
static uint32_t stack_without_frames(void) {
    Stack stack;
    memset(&stack, 0, sizeof stack);
    stack.context = is_in_backward() ? BACKWARD : NO_CONTEXT;
    lock_stacks();
    uint32_t began = generation;
    unlock_stacks();
    return number_of_stack(&stack, began);
}

/* The innermost frames of the user's code, at most two consecutive ones of one file: a deep network
   runs many frames of one file, which would hide the code that called it. */
typedef struct {
    Stack stack;
    uint64_t last, before_last; /* files of the frames that were added last */
} Frames;

static void add_frame(Frames *frames, uint32_t number, uint64_t file, int last) {
    if (frames->stack.count == MAX_FRAMES || (file == frames->last && file == frames->before_last)) return;
    frames->stack.codes[frames->stack.count] = number;
    frames->stack.last[frames->stack.count++] = last;
    frames->before_last = frames->last;
    frames->last = file;
}

/* Add a frame and those that called it; takes over one reference to it. */
static void add_frames(Frames *frames, Object frame) {
    for (int i = 0; frame && i < MOST_SEARCHED && frames->stack.count < MAX_FRAMES; i++) {
        Object object = py.Frame_GetCode(frame);
        if (object == module_code && first_local && !frames->stack.module)
            frames->stack.module = local_at(frame, first_local);
        Code code;
        uint32_t number = number_of_code(object, &code);
        if (!number || code.kind == END) break;
        if (!frames->stack.context) frames->stack.context = code.context;
        if (code.kind == USER) add_frame(frames, number, code.file, frame_lasti(frame));
        Object back = py.Frame_GetBack(frame);
        py._DecRef(frame);
        frame = back;
    }
    if (frame) py._DecRef(frame);
}

/* Add the frames of the thread that waits for the backward pass of this thread, which are the same
   during the whole pass, so that they are searched for once. */
static void add_caller(Frames *frames, uint32_t began) {
    static __thread Stack caller;
    static __thread int task = -1;
    static __thread uint32_t of_generation;
    if (task != backward_pass() || of_generation != began) {
        Frames found;
        memset(&found, 0, sizeof found);
        add_frames(&found, frame_that_waits());
        caller = found.stack;
        task = backward_pass();
        of_generation = began;
    }
    if (!frames->stack.module) frames->stack.module = caller.module;
    for (int i = 0; i < caller.count; i++) {
        lock_stacks();
        int is_known = generation == began;
        uint64_t file = is_known ? ((Code *)item_at(&codes, caller.codes[i]))->file : 0;
        unlock_stacks();
        if (is_known) add_frame(frames, caller.codes[i], file, caller.last[i]);
    }
}

/* Return the number of this thread's stack, whose outermost frame may be another thread's. */
static uint32_t walk(void) {
    Frames frames;
    memset(&frames, 0, sizeof frames);
    lock_stacks();
    uint32_t began = generation;
    unlock_stacks();
    add_frames(&frames, py.ThreadState_GetFrame(py.ThreadState_Get()));
    int has_own = frames.stack.count > 0;
    if (is_in_backward() && runs_for_another_thread()) add_caller(&frames, began);
    if (!frames.stack.context && is_in_backward()) frames.stack.context = BACKWARD;
    uint32_t number = number_of_stack(&frames.stack, began);
    has_frames = has_own;
    return number;
}

/* Return the number of the calling thread's Python stack. Waits for the interpreter's lock. */
uint32_t current_stack(void) {
    if (!is_ready() || inside) return NO_STACK;
    if (!py.GILState_GetThisThreadState()) return stack_without_frames();
    if (is_finalizing && is_finalizing()) return NO_STACK; /* waiting would never end */
    inside = 1;
    int state = py.GILState_Ensure();
    int collects = collects_at_allocations && py.GC_Disable();
    uint32_t number = walk();
    if (collects) py.GC_Enable();
    py.GILState_Release(state);
    inside = 0;
    return number;
}

/* Note this thread's stack for its next allocation, which cannot wait for the interpreter's lock. */
void note_stack(void) {
    if (any_region_open()) noted = current_stack();
}

/* Return the stack that was noted, once. */
uint32_t take_stack(void) {
    uint32_t taken = noted;
    noted = NO_STACK;
    last_taken = has_frames ? taken : NO_STACK;
    last_operator = operator_number;
    return taken;
}

/* Torch lets go of the interpreter's lock to run an operator, and again to free a tensor of Python's. */
void note_operator(void) { operator_number++; }

/* On an emulated device that computes values, operators are called by Python, which keeps its lock. */
static int (*emulated_runs_operator)(void);

void find_emulated_device(void) {
    *(void **)&emulated_runs_operator = dlsym(RTLD_DEFAULT, "emulated_runs_operator");
}

/* Whether an emulated device is loaded. */
int is_device_emulated(void) { return emulated_runs_operator != NULL; }

/* Whether this thread still runs the operator that allocated a block with this stack. */
int in_operator_of(uint32_t stack) {
    if (stack == NO_STACK || stack != last_taken || last_operator != operator_number || !is_ready()) return 0;
    return !py.GILState_Check() || (emulated_runs_operator && emulated_runs_operator());
}

/* Write the frames of a stack, innermost first, and return their number. The caller holds the
   interpreter's lock. The references to code objects are borrowed. */
EXPORT int stacks_read(uint32_t stack, Object *out_codes, int *out_last) {
    int count = 0;
    uint32_t number = stack & 0xffff;
    lock_stacks();
    if (number && number <= stacks.used && stack >> 16 == (generation & 0xffff)) {
        const Stack *found = item_at(&stacks, number);
        for (; count < found->count; count++) {
            out_codes[count] = ((Code *)item_at(&codes, found->codes[count]))->code;
            out_last[count] = found->last[count];
        }
    }
    unlock_stacks();
    return count;
}

/* Return the identity of the module in which a stack was noted, 0 if there was none, and the context
   in `*context`. */
EXPORT uint64_t stacks_module(uint32_t stack, uint32_t *context) {
    uint64_t module = 0;
    uint32_t number = stack & 0xffff;
    *context = NO_CONTEXT;
    lock_stacks();
    if (number && number <= stacks.used && stack >> 16 == (generation & 0xffff)) {
        const Stack *found = item_at(&stacks, number);
        module = found->module;
        *context = found->context;
    }
    unlock_stacks();
    return module;
}

/* Release all code objects, unless a region is open. The caller holds the interpreter's lock. */
EXPORT void stacks_release(void) {
    Object *old = NULL;
    uint32_t count = 0;
    lock_stacks();
    if (codes.used && !any_region_open() && (old = malloc(codes.used * sizeof *old))) {
        for (; count < codes.used; count++) old[count] = ((Code *)item_at(&codes, count + 1))->code;
        empty(&codes);
        empty(&stacks);
        forget_modules();
        generation++;
    }
    unlock_stacks();
    for (uint32_t i = 0; i < count; i++) py._DecRef(old[i]); /* may run Python code */
    free(old);
}
