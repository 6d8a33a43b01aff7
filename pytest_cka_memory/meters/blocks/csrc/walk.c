/* A walk over Python's objects, from some of them to all that they reference.

   It finds what holds a tensor. The caller holds the interpreter's lock, and nothing here runs code of
   Python's, so no object changes while it is asked for what it references. */
#include "python.h"

#include <stdlib.h>

#define FIRST_CAPACITY 4096

typedef struct {
    Object *met; /* every object, in the order in which it was met; each is referenced from here */
    size_t count, room;
    Set all;     /* the same */
    Set leaves;  /* types whose objects reference nothing of interest */
    Set plain;   /* types: of their objects, only what they reference is of interest */
    Object special; /* a list: the new objects of other types */
} Walk;

static int is_of_type(const Set *types, Object object) {
    Object type = py.Object_Type(object);
    int found = set_has(types, type);
    py._DecRef(type);
    return found;
}

static int leads_on(Object object, void *walk) {
    return !is_of_type(&((Walk *)walk)->leaves, object);
}

static int keep(Walk *walk, Object object) {
    if (walk->count == walk->room) {
        size_t room = walk->room ? 2 * walk->room : FIRST_CAPACITY;
        Object *larger = realloc(walk->met, room * sizeof(Object));
        if (!larger) return no_memory();
        walk->met = larger;
        walk->room = room;
    }
    py._IncRef(object);
    walk->met[walk->count++] = object;
    return 0;
}

/* Add an object that was not met before. The collector does not track dicts and tuples of numbers
   and strings, of which there may be very many: those that lead nowhere are left out. */
static int meet(Object object, void *argument) {
    Walk *walk = argument;
    if (!leads_on(object, walk) || set_has(&walk->all, object)) return 0;
    int is_plain = is_of_type(&walk->plain, object);
    if (is_plain && !py.Object_GC_IsTracked(object) && !traverse(object, leads_on, walk)) return 0;
    if (set_add(&walk->all, object) == FAILED) return FAILED;
    if (keep(walk, object)) return FAILED;
    return is_plain ? 0 : py.List_Append(walk->special, object);
}

EXPORT void walk_end(Walk *walk) {
    for (size_t i = 0; i < walk->count; i++) py._DecRef(walk->met[i]);
    free(walk->met);
    free(walk->all.slots);
    free(walk->leaves.slots);
    free(walk->plain.slots);
    free(walk);
}

/* Begin a walk that meets no object of the types in the list `leaves`. NULL if there is no memory. */
EXPORT Walk *walk_begin(Object leaves) {
    Walk *walk = calloc(1, sizeof(Walk));
    if (!walk) return no_memory(), NULL;
    for (ptrdiff_t i = 0; i < py.List_Size(leaves); i++)
        if (set_add(&walk->leaves, py.List_GetItem(leaves, i)) == FAILED) {
            walk_end(walk);
            return NULL;
        }
    return walk;
}

/* Call a type plain. It must exist as long as the walk. */
EXPORT int walk_add_plain(Walk *walk, Object type) { return set_add(&walk->plain, type); }

/* Meet the objects of a list. Those that are new and not of a plain type are added to `special`.
   Returns how many have been met in all. Each of these functions returns FAILED or NULL, with an
   exception, if there is no memory. */
EXPORT int64_t walk_enter(Walk *walk, Object values, Object special) {
    walk->special = special;
    for (ptrdiff_t i = 0; i < py.List_Size(values); i++)
        if (meet(py.List_GetItem(values, i), walk)) return FAILED;
    return (int64_t)walk->count;
}

/* Do the same with all that the objects reference that were met from number `first` to `end`. */
EXPORT int64_t walk_follow(Walk *walk, size_t first, size_t end, Object special) {
    walk->special = special;
    for (size_t i = first; i < end; i++)
        if (traverse(walk->met[i], meet, walk)) return FAILED;
    return (int64_t)walk->count;
}

EXPORT int walk_has(Walk *walk, Object object) { return set_has(&walk->all, object); }

/* Return the objects that were met from number `first` to `end`. */
EXPORT Object walk_met(Walk *walk, size_t first, size_t end) {
    Object found = py.List_New(0);
    for (size_t i = first; found && i < end; i++)
        if (py.List_Append(found, walk->met[i])) {
            py._DecRef(found);
            found = NULL;
        }
    return found;
}

typedef struct {
    Set wanted, found;
    Object parent, pairs;
} Parents;

static int is_parent(Object object, void *argument) {
    Parents *parents = argument;
    if (!set_has(&parents->wanted, object)) return 0;
    int is_new = set_add(&parents->found, object);
    if (is_new <= 0) return is_new;
    return py.List_Append(parents->pairs, object) || py.List_Append(parents->pairs, parents->parent);
}

/* Return, for each object of a list, the first of the objects from number `first` to `end` that
   references it, if one does, as object, parent, object, parent, ... */
EXPORT Object walk_parents(Walk *walk, size_t first, size_t end, Object wanted) {
    Parents parents = {.pairs = py.List_New(0)};
    int failed = !parents.pairs;
    for (ptrdiff_t i = 0; !failed && i < py.List_Size(wanted); i++)
        failed = set_add(&parents.wanted, py.List_GetItem(wanted, i)) == FAILED;
    for (size_t i = first; !failed && i < end && parents.found.count < parents.wanted.count; i++) {
        parents.parent = walk->met[i];
        failed = traverse(parents.parent, is_parent, &parents) != 0;
    }
    free(parents.wanted.slots);
    free(parents.found.slots);
    if (failed && parents.pairs) py._DecRef(parents.pairs);
    return failed ? NULL : parents.pairs;
}

typedef struct {
    Walk *walk;
    Object found;
} Unmet;

static int is_unmet(Object object, void *walk) {
    return leads_on(object, walk) && !set_has(&((Walk *)walk)->all, object);
}

/* Add an object, unless it leads to nothing that was not met: most do. */
static int add_unmet(Object object, void *argument) {
    Unmet *unmet = argument;
    Walk *walk = unmet->walk;
    if (!is_unmet(object, walk)) return 0;
    if (is_of_type(&walk->plain, object) && !traverse(object, is_unmet, walk)) return 0;
    return py.List_Append(unmet->found, object);
}

static Object result(Unmet *unmet, int failed) {
    if (failed && unmet->found) py._DecRef(unmet->found);
    return failed ? NULL : unmet->found;
}

/* Return the objects that one references and that were not met. */
EXPORT Object walk_unmet_referents(Walk *walk, Object object) {
    Unmet unmet = {walk, py.List_New(0)};
    return result(&unmet, !unmet.found || traverse(object, add_unmet, &unmet));
}

/* Return those objects in the list `get(*arguments)` that were not met. No other thread sees a
   reference from the list of all objects, as in objects.c. */
EXPORT Object walk_unmet(Walk *walk, Object get, Object arguments) {
    Object all = py.Object_CallObject(get, arguments);
    Unmet unmet = {walk, all ? py.List_New(0) : NULL}; /* after that: it is not among them */
    int failed = !unmet.found;
    for (ptrdiff_t i = 0; !failed && i < py.List_Size(all); i++)
        failed = add_unmet(py.List_GetItem(all, i), &unmet) != 0;
    if (all) py._DecRef(all);
    return result(&unmet, failed);
}
