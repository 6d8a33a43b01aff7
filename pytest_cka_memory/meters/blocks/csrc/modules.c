/* The paths of modules in their networks, such as encoder.layers.2.linear1, noted while they run: a
   network may be freed before its region ends.

   A module that runs was called by those around it, whose frames are on the stack. So its path begins
   in the outermost of them, and each is found among the modules that the one around it contains. No
   code of the user is called, and no module is kept alive. */
#include "python.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_FRAMES 400
#define MOST_NESTED 64
#define MOST_DEPTH 8
#define MOST_MODULES 65536
#define LONGEST_PATH 512
#define IS_DICT (1ul << 29) /* Py_TPFLAGS_DICT_SUBCLASS */

typedef struct {
    Object module; /* its identity only */
    char *path;
} Named;

static Named *named; /* under the lock of stacks */
static uint32_t named_count, named_size;

static int is_named(Object module) {
    for (uint32_t i = 0; i < named_count; i++)
        if (named[i].module == module) return 1;
    return 0;
}

static void add(Object module, const char *path) {
    lock_stacks();
    if (named_count == named_size && named_size < MOST_MODULES) {
        uint32_t size = named_size ? 2 * named_size : 64;
        Named *more = realloc(named, size * sizeof *more);
        if (more) {
            named = more;
            named_size = size;
        }
    }
    char *copy = named_count < named_size ? strdup(path) : NULL;
    if (copy) named[named_count++] = (Named){module, copy};
    unlock_stacks();
}

/* Return the dict of a module's children, a new reference; NULL if it has none. */
static Object children_of(Object module) {
    Object name = py.Unicode_FromString("_modules");
    Object found = name ? py.Object_GenericGetAttr(module, name) : NULL;
    if (name) py._DecRef(name);
    if (found && py.Type_GetFlags(((Object *)found)[1]) & IS_DICT) return found;
    if (found) py._DecRef(found);
    return NULL;
}

/* Append the path from a module to another inside it; return 0 if it is not there. */
static int find_path(Object from, Object to, char *path, int depth) {
    Object children = depth ? children_of(from) : NULL;
    if (!children) return 0;
    size_t length = strlen(path);
    int found = 0;
    /* Its own children first: most modules are called by the one that has them. */
    for (int deeper = 0; deeper < 2 && !found; deeper++) {
        Object key, child;
        ptrdiff_t place = 0, size = 0;
        while (!found && py.Dict_Next(children, &place, &key, &child)) {
            if (deeper ? child == to : child != to) continue;
            const char *name = py.Unicode_AsUTF8AndSize(key, &size);
            if (!name || length + (size_t)size + 2 > LONGEST_PATH) continue;
            snprintf(path + length, LONGEST_PATH - length, "%s%s", length ? "." : "", name);
            found = !deeper || find_path(child, to, path, depth - 1);
            if (!found) path[length] = 0;
        }
    }
    py._DecRef(children);
    return found;
}

/* Put the name of a module's class in front of a path that alone would say nothing. */
static void add_class(Object module, char *path) {
    if (path[0] && (path[0] < '0' || path[0] > '9')) return;
    char rest[LONGEST_PATH];
    strcpy(rest, path);
    Object name = py.Object_GetAttrString(((Object *)module)[1], "__name__");
    ptrdiff_t size = 0;
    const char *text = name ? py.Unicode_AsUTF8AndSize(name, &size) : NULL;
    snprintf(path, LONGEST_PATH, "%s%s%s", text ? text : "module", rest[0] ? "." : "", rest);
    if (name) py._DecRef(name);
}

static int running_modules(Object *modules) {
    int count = 0;
    Object frame = py.ThreadState_GetFrame(py.ThreadState_Get());
    for (int i = 0; frame && i < MOST_FRAMES && count < MOST_NESTED; i++) {
        Object module = module_of_frame(frame);
        if (module && !(count && modules[count - 1] == module)) modules[count++] = module;
        Object back = py.Frame_GetBack(frame);
        py._DecRef(frame);
        frame = back;
    }
    if (frame) py._DecRef(frame);
    return count;
}

/* Note the path of the innermost running module, unless it has one. */
void name_module(Object module) {
    lock_stacks();
    int known = is_named(module);
    unlock_stacks();
    Object modules[MOST_NESTED];
    int count = known ? 0 : running_modules(modules);
    if (!count || modules[0] != module) return;
    Object type, value, trace;
    py.Err_Fetch(&type, &value, &trace);
    char path[LONGEST_PATH] = "";
    Object outermost = modules[count - 1];
    for (int i = count - 1; i > 0; i--)
        if (!find_path(modules[i], modules[i - 1], path, MOST_DEPTH)) {
            path[0] = 0; /* it is not a part of the module that called it */
            outermost = modules[i - 1];
        }
    add_class(outermost, path);
    py.Err_Restore(type, value, trace); /* also ends an error of ours */
    add(module, path);
}

/* Write the path of a module that was noted, and return its length; 0 if there is none. */
EXPORT int modules_path(uint64_t module, char *out, int size) {
    int length = 0;
    lock_stacks();
    for (uint32_t i = 0; i < named_count && !length; i++)
        if ((uintptr_t)named[i].module == module)
            length = snprintf(out, (size_t)size, "%s", named[i].path);
    unlock_stacks();
    return length < size ? length : size - 1;
}

/* Forget all paths. The caller holds the lock of stacks. */
void forget_modules(void) {
    for (uint32_t i = 0; i < named_count; i++) free(named[i].path);
    named_count = 0;
}
