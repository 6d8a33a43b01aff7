/* What an object of Python references, and sets of objects.

   Each object is asked for what it references as Python's own collector asks it (tp_traverse), with
   functions of the stable API that are found at run time. */
#include "python.h"

#include <stdlib.h>

#define TP_TRAVERSE 71 /* the number of that slot in the stable API */
#define FIRST_CAPACITY 4096

typedef int (*Traverse)(Object, Visit, void *);

/* Return the place of an address in a table, or the free place for it. */
static Object *place_of(const Set *set, Object object) {
    size_t mask = set->capacity - 1;
    size_t at = ((uint64_t)(uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 20 & mask;
    while (set->slots[at] && set->slots[at] != object) at = (at + 1) & mask;
    return &set->slots[at];
}

int set_has(const Set *set, Object object) { return set->capacity && *place_of(set, object); }

int no_memory(void) {
    py.Err_NoMemory();
    return FAILED;
}

static int grow(Set *set) {
    Set larger = {NULL, set->capacity ? 2 * set->capacity : FIRST_CAPACITY, set->count};
    if (!(larger.slots = calloc(larger.capacity, sizeof(Object)))) return no_memory();
    for (size_t i = 0; i < set->capacity; i++)
        if (set->slots[i]) *place_of(&larger, set->slots[i]) = set->slots[i];
    free(set->slots);
    *set = larger;
    return 0;
}

/* Return 1 if it was added, 0 if it was there. */
int set_add(Set *set, Object object) {
    if (2 * set->count >= set->capacity && grow(set)) return FAILED;
    Object *place = place_of(set, object);
    if (*place) return 0;
    *place = object;
    set->count++;
    return 1;
}

/* Return the function by which objects of a type tell what they reference; NULL if they do not. */
void *traverse_of(Object type) { return py.Type_GetSlot(type, TP_TRAVERSE); }

/* Call `visit` for everything that an object references, until that returns something else than 0. */
int traverse(Object object, Visit visit, void *argument) {
    if (!py.Object_IS_GC(object)) return 0;
    Object type = py.Object_Type(object);
    Traverse function = (Traverse)traverse_of(type);
    py._DecRef(type);
    return function ? function(object, visit, argument) : 0;
}
