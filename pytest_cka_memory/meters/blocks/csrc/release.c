/* What is freed with garbage: objects to which only garbage has references.

   The collector sees what Python objects reference. Tensors, storages and autograd nodes reference
   each other in C++, too: such an object is special, and freed with the last of its references in both
   languages. How to ask the special objects of a type is learned from the caller once, as functions to
   call; what is not learned, the caller follows. Nothing is freed for it. The caller holds the
   interpreter's lock and lets no collection run. */
#include "python.h"

#include <stdlib.h>

#define MOST_KINDS 1024
#define PLAIN_TYPES 8
#define FIRST_ROOM 256
#define COUNT 0xFFFFFFFFu /* the count of strong references is in the lower half of a word */
#define BY_CALLER 1 /* beside 0 and FAILED: the caller has to follow an object */

/* What to do with the result of a function that is called with an object. */
enum {
    MUST_BE,   /* unless it is the expected one, the caller follows the object */
    REFERENCE, /* the object references it, if it is not None */
    NODES,     /* a tuple of tuples, whose first items the object references, if they are not None */
    SAVED,     /* what an autograd node has saved, or a tuple of it; an error means that it is freed */
    STORAGE    /* nothing is called: the object has memory */
};

typedef struct {
    int what;
    Object function, expected;
} Step;

/* How to ask the objects of a type. */
typedef struct {
    Object type;
    Object counter; /* a function that returns how many references C++ has; NULL if they are read */
    int place;      /* where in the object the address is behind which they are counted */
    int of_object;  /* how many of these are the object's */
    int of_cpp;     /* how many references to the object are C++'s, as long as there are any in C++ */
    int may_wait;
    int count;
    Step steps[];
} Kind;

/* The types are torch's own, which exist as long as the process. */
static Kind *kinds[MOST_KINDS];
static size_t kind_count;
static Kind *by_address[256]; /* found last, by a part of the type's address */
static int place_of_hooks = -1; /* where in what a node has saved the hooks of the user are */
static Object none, name_of_data, error_if_freed;

enum { FREED = 1, MET = 2 };

typedef struct {
    ObjectTable table; /* objects that have lost references, or that are freed */
    Object bases;      /* a tuple: these types and those derived from them are special, */
    Traverse special_traverse; /* and types that have this function */
    Object plain_types[PLAIN_TYPES]; /* some that are not special: most objects have few types */
    size_t plain_count;
    Object met;      /* a list: special objects that have lost references, so that they stay alive */
    Object storages; /* a list: those that are freed */
    Object *freed, *todo; /* plain objects that are still to be followed, and special ones to be looked at */
    size_t freed_count, freed_room, todo_count, todo_room;
    int deepest; /* the caller follows deeper nodes */
} Release;

static Kind *kind_of(Object type) {
    Kind **last = &by_address[(uintptr_t)type / 64 % 256];
    if (*last && (*last)->type == type) return *last;
    for (size_t i = 0; i < kind_count; i++)
        if (kinds[i]->type == type) return *last = kinds[i];
    return NULL;
}

/* Learn how to ask objects of a type, which must not be derived by users. `steps` is a tuple of tuples:
   what to do, a function, and the object that it must return, or None. Returns 1 if it was learned. */
EXPORT int release_learn(
    Object type, Object counter, int place, int of_object, int of_cpp, int may_wait, Object steps) {
    ptrdiff_t count = py.Tuple_Size(steps);
    if (kind_count == MOST_KINDS || kind_of(type)) return 0;
    Kind *kind = calloc(1, sizeof *kind + (size_t)count * sizeof *kind->steps);
    if (!kind) return no_memory();
    *kind = (Kind){type, counter, place, of_object, of_cpp, may_wait, (int)count};
    for (int i = 0; i < kind->count; i++) {
        Object step = py.Tuple_GetItem(steps, i);
        kind->steps[i].what = (int)py.Long_AsLong(py.Tuple_GetItem(step, 0));
        kind->steps[i].function = py.Tuple_GetItem(step, 1);
        kind->steps[i].expected = py.Tuple_GetItem(step, 2);
    }
    py._IncRef(steps); /* never freed, as the kind */
    if (counter) py._IncRef(counter);
    kinds[kind_count++] = kind;
    return 1;
}

/* Learn how to read what a node has saved: where the hooks of the user are, or -1; the name of the
   attribute that has the tensor; the error that reading what was freed raises; and None. These exist
   as long as the process. */
EXPORT void release_learn_saved(int hooks, Object name, Object error, Object is_none) {
    place_of_hooks = hooks;
    none = is_none;
    name_of_data = name;
    error_if_freed = error;
}

static int add(Object object, Object **objects, size_t *count, size_t *room) {
    if (*count == *room) {
        size_t more = *room ? 2 * *room : FIRST_ROOM;
        Object *larger = realloc(*objects, more * sizeof *larger);
        if (!larger) return no_memory();
        *objects = larger;
        *room = more;
    }
    (*objects)[(*count)++] = object;
    return 0;
}

static int is_special(Release *release, Object object) {
    Object type = type_of(object);
    for (size_t i = 0; i < release->plain_count && i < PLAIN_TYPES; i++)
        if (release->plain_types[i] == type) return 0;
    if (release->special_traverse && traverse_of(type) == release->special_traverse) return 1;
    for (ptrdiff_t i = 0; i < py.Tuple_Size(release->bases); i++)
        if (py.Type_IsSubtype(type, py.Tuple_GetItem(release->bases, i))) return 1;
    release->plain_types[release->plain_count++ % PLAIN_TYPES] = type;
    return 0;
}

/* Take note that a special object is to be looked at. */
static int meet(Release *release, ObjectEntry *entry) {
    Object object = entry->object;
    if (!(entry->state & MET)) {
        entry->state |= MET;
        if (py.List_Append(release->met, object)) return FAILED;
    }
    return add(object, &release->todo, &release->todo_count, &release->todo_room);
}

/* Take note that an object has lost one of its references. */
static int lose(Object object, void *argument) {
    Release *release = argument;
    ObjectEntry *entry = table_entry(&release->table, object);
    if (!entry && !(entry = table_append(&release->table, object))) return FAILED;
    if (entry->state & FREED) return 0;
    entry->left--;
    if (is_special(release, object)) return meet(release, entry);
    if (entry->left > 0) return 0;
    entry->state |= FREED;
    return add(object, &release->freed, &release->freed_count, &release->freed_room);
}

static int follow_freed(Release *release) {
    while (release->freed_count)
        if (traverse(release->freed[--release->freed_count], lose, release)) return FAILED;
    return 0;
}

EXPORT void release_end(Release *release) {
    table_free(&release->table);
    free(release->freed);
    free(release->todo);
    free(release);
}

/* Begin to follow what is freed with the objects of the list `garbage`. Special are the types of a
   tuple, those derived from them, and those that are traversed as the type `like`, if it is not NULL.
   The lists `met` and `storages` are filled; the tuple and they must exist as long as the result. */
EXPORT Release *release_begin(
    Object garbage, Object bases, Object like, int deepest, Object met, Object storages) {
    Release *release = calloc(1, sizeof *release);
    if (!release) return no_memory(), NULL;
    release->met = met;
    release->storages = storages;
    release->bases = bases;
    release->deepest = deepest;
    release->special_traverse = like ? traverse_of(like) : NULL;
    int failed = 0;
    ptrdiff_t count = py.List_Size(garbage);
    for (ptrdiff_t i = 0; !failed && i < count; i++) {
        ObjectEntry *entry = table_append(&release->table, py.List_GetItem(garbage, i));
        if (!entry) failed = 1;
        else entry->left = 0; /* only other garbage references it in Python */
    }
    for (ptrdiff_t i = 0; !failed && i < count; i++) {
        ObjectEntry *entry = &release->table.entries[i];
        if (is_special(release, entry->object)) {
            failed = meet(release, entry);
        } else {
            entry->state |= FREED;
            failed = add(entry->object, &release->freed, &release->freed_count, &release->freed_room);
        }
    }
    if (!failed && !follow_freed(release)) return release;
    release_end(release);
    return NULL;
}

/* Take note how many references the objects of a list have, one of them from the list. The caller has
   no others. */
EXPORT int release_note(Release *release, Object list) {
    size_t known = release->table.count;
    for (ptrdiff_t i = 0; i < py.List_Size(list); i++) {
        Object object = py.List_GetItem(list, i);
        ObjectEntry *entry = table_entry(&release->table, object);
        if (!entry && !(entry = table_append(&release->table, object))) return FAILED;
        if ((size_t)(entry - release->table.entries) >= known) entry->left--;
    }
    return 0;
}

EXPORT int release_is_freed(Release *release, Object object) {
    ObjectEntry *entry = table_entry(&release->table, object);
    return entry && entry->state & FREED;
}

/* Whether an object has lost all of its references: `in_cpp` are in C++, and while there are any of these,
   C++ holds `of_cpp` of those in Python. */
EXPORT int release_is_unused(Release *release, Object object, int64_t in_cpp, int of_cpp) {
    ObjectEntry *entry = table_entry(&release->table, object);
    return entry && in_cpp <= entry->lost && entry->left <= (in_cpp > 0 ? of_cpp : 0);
}

EXPORT int release_depth(Release *release, Object object) {
    ObjectEntry *entry = table_entry(&release->table, object);
    return entry ? entry->depth : 0;
}

static int lose_unless_node(Object object, void *argument) {
    Release *release = argument;
    int is_node = release->special_traverse && traverse_of(type_of(object)) == release->special_traverse;
    return is_node ? 0 : lose(object, release);
}

/* Take note that a special object is freed, and follow what Python knows that it references. A tensor
   shows nodes of its graph that it does not reference: these are left out. */
EXPORT int release_free(Release *release, Object object) {
    ObjectEntry *entry = table_entry(&release->table, object);
    if (entry) entry->state |= FREED;
    return traverse(object, lose_unless_node, release) || follow_freed(release) ? FAILED : 0;
}

/* Take note that an object that was noted has lost a reference of Python. */
EXPORT int release_lose(Release *release, Object object) {
    return lose(object, release) || follow_freed(release) ? FAILED : 0;
}

/* Take note that objects that were noted have lost a reference of C++; the first `nodes` are nodes at
   that depth. */
EXPORT int release_lose_in_cpp(Release *release, Object list, ptrdiff_t nodes, int depth) {
    for (ptrdiff_t i = 0; i < py.List_Size(list); i++) {
        ObjectEntry *entry = table_entry(&release->table, py.List_GetItem(list, i));
        entry->lost++;
        if (i < nodes && depth > entry->depth) entry->depth = (int16_t)depth;
        if (meet(release, entry)) return FAILED;
    }
    return 0;
}

static uintptr_t word(uintptr_t address) { return *(uintptr_t *)address; }

/* Return how many references C++ has to an object, without that of the object; negative after an error. */
static int64_t references_in_cpp(const Kind *kind, Object object) {
    if (!kind->counter)
        return (int64_t)(word(word((uintptr_t)object + (size_t)kind->place) + sizeof(uintptr_t)) & COUNT) -
               kind->of_object;
    Object number = py.Object_CallFunctionObjArgs(kind->counter, object, NULL);
    int64_t count = number ? py.Long_AsLong(number) - kind->of_object : FAILED;
    if (number) py._DecRef(number);
    return count;
}

/* Forget an error; return whether it is one of those that are derived from a type. */
static int forget_error(Object expected) {
    Object type, value, trace;
    py.Err_Fetch(&type, &value, &trace);
    int is_expected = type && expected && py.Type_IsSubtype(type, expected);
    if (type) py._DecRef(type);
    if (value) py._DecRef(value);
    if (trace) py._DecRef(trace);
    return is_expected;
}

/* Append what is not None to a list, and drop the reference to it; after an error it is NULL. */
static int take(Object value, Object list) {
    if (!value) return forget_error(NULL), BY_CALLER;
    int failed = value == none ? 0 : py.List_Append(list, value);
    py._DecRef(value);
    return failed ? FAILED : 0;
}

static int take_nodes(Object pairs, Object list) {
    for (ptrdiff_t i = 0; i < py.Tuple_Size(pairs); i++) {
        Object node = py.Tuple_GetItem(py.Tuple_GetItem(pairs, i), 0);
        if (node != none && py.List_Append(list, node)) return FAILED;
    }
    return 0;
}

static int take_saved(Object saved, Object list) {
    /* An object of pybind11: its third word is the address of what it is in C++. */
    if (saved == none) return 0;
    if (place_of_hooks >= 0 && word(((uintptr_t *)saved)[2] + (size_t)place_of_hooks)) return BY_CALLER;
    return take(py.Object_GetAttr(saved, name_of_data), list);
}

static int do_step(const Step *step, Object object, Object list) {
    Object value = py.Object_CallFunctionObjArgs(step->function, object, NULL);
    if (!value) return forget_error(error_if_freed) && step->what == SAVED ? 0 : BY_CALLER;
    int result = 0;
    if (step->what == REFERENCE) return take(value, list);
    if (step->what == MUST_BE) {
        result = value == step->expected ? 0 : BY_CALLER;
    } else if (step->what == NODES) {
        result = take_nodes(value, list);
    } else if (py.Type_GetFlags(type_of(value)) & (1UL << 26)) { /* Py_TPFLAGS_TUPLE_SUBCLASS */
        for (ptrdiff_t i = 0; !result && i < py.Tuple_Size(value); i++)
            result = take_saved(py.Tuple_GetItem(value, i), list);
    } else {
        result = take_saved(value, list);
    }
    py._DecRef(value);
    return result;
}

/* Follow an object of a kind that was learned, which is freed. */
static int follow(Release *release, const Kind *kind, Object object) {
    int depth = release_depth(release, object), has_memory = 0, result = 0;
    if (depth >= release->deepest) return BY_CALLER;
    Object list = py.List_New(0);
    if (!list) return FAILED;
    ptrdiff_t nodes = 0; /* they come first */
    for (int i = 0; !result && i < kind->count; i++) {
        has_memory |= kind->steps[i].what == STORAGE;
        if (kind->steps[i].what != STORAGE) result = do_step(&kind->steps[i], object, list);
        if (kind->steps[i].what == NODES) nodes = py.List_Size(list);
    }
    if (!result && has_memory) result = py.List_Append(release->storages, object);
    if (!result) result = release_note(release, list);
    if (!result) result = release_free(release, object);
    if (!result) result = release_lose_in_cpp(release, list, nodes, depth + 1);
    py._DecRef(list);
    return result;
}

/* Follow all that has lost its references, and add to the list `left_over` what the caller has to follow:
   objects of kinds that were not learned, and some others. */
EXPORT int release_follow(Release *release, Object left_over) {
    while (release->todo_count) {
        Object object = release->todo[--release->todo_count];
        if (release_is_freed(release, object)) continue;
        const Kind *kind = kind_of(type_of(object));
        int result = kind ? 0 : BY_CALLER;
        if (kind) {
            int64_t in_cpp = references_in_cpp(kind, object);
            if (in_cpp < 0) return FAILED;
            if (!release_is_unused(release, object, in_cpp, kind->of_cpp)) continue;
            result = follow(release, kind, object);
        }
        if (result == BY_CALLER) result = py.List_Append(left_over, object);
        if (result) return FAILED;
    }
    return 0;
}

/* Add to the list `waiting` those that have lost all references of Python, but not those of C++, and to
   `left_over` those of which the caller has to find out. */
EXPORT int release_waiting(Release *release, Object waiting, Object left_over) {
    for (ptrdiff_t i = 0; i < py.List_Size(release->met); i++) {
        Object object = py.List_GetItem(release->met, i);
        ObjectEntry *entry = table_entry(&release->table, object);
        const Kind *kind = kind_of(type_of(object));
        if (entry->state & FREED || (kind && !kind->may_wait)) continue;
        int64_t in_cpp = kind ? references_in_cpp(kind, object) : 0;
        if (in_cpp < 0) return FAILED;
        if (kind && entry->left > (in_cpp > 0 ? kind->of_cpp : 0)) continue;
        if (py.List_Append(kind ? waiting : left_over, object)) return FAILED;
    }
    return 0;
}

/* Return how many references of Python an object has that are not lost. */
EXPORT int64_t release_left(Release *release, Object object) {
    ObjectEntry *entry = table_entry(&release->table, object);
    return !entry || entry->state & FREED ? 0 : entry->left;
}
