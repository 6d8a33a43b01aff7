/* What an object of Python references, and sets and tables of objects.

   Each object is asked for what it references as Python's own collector asks it (tp_traverse), with
   functions of the stable API that are found at run time. */
#include "python.h"

#include <stdlib.h>

#define TP_TRAVERSE 71 /* the number of that slot in the stable API */
#define FIRST_CAPACITY 4096
#define FIRST_ROOM 1024

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

void set_clear(Set *set) {
    free(set->slots);
    *set = (Set){NULL, 0, 0};
}

static uint32_t *slot_of(const ObjectTable *table, Object object) {
    size_t mask = table->capacity - 1;
    size_t at = ((uint64_t)(uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 20 & mask;
    while (table->slots[at] && table->entries[table->slots[at] - 1].object != object)
        at = (at + 1) & mask;
    return &table->slots[at];
}

/* Return the entry of an object, until the next is added; NULL if it has none. */
ObjectEntry *table_entry(const ObjectTable *table, Object object) {
    uintptr_t address = (uintptr_t)object;
    if (!table->count || address < table->lowest || address > table->highest) return NULL;
    uint32_t number = *slot_of(table, object);
    return number ? &table->entries[number - 1] : NULL;
}

static int make_room(ObjectTable *table) {
    size_t room = table->room ? 2 * table->room : FIRST_ROOM;
    ObjectEntry *entries = realloc(table->entries, room * sizeof *entries);
    if (!entries) return no_memory();
    table->entries = entries;
    uint32_t *slots = calloc(2 * room, sizeof *slots);
    if (!slots) return no_memory();
    free(table->slots);
    table->slots = slots;
    table->room = room;
    table->capacity = 2 * room;
    for (size_t i = 0; i < table->count; i++)
        *slot_of(table, entries[i].object) = (uint32_t)(i + 1);
    return 0;
}

/* Add an object that is not in the table; NULL if there is no memory. */
ObjectEntry *table_append(ObjectTable *table, Object object) {
    if (table->count == table->room && make_room(table)) return NULL;
    uintptr_t address = (uintptr_t)object;
    if (!table->count || address < table->lowest) table->lowest = address;
    if (address > table->highest) table->highest = address;
    ObjectEntry *entry = &table->entries[table->count++];
    *entry = (ObjectEntry){object, references_to(object), 0, 0, 0};
    *slot_of(table, object) = (uint32_t)table->count;
    return entry;
}

void table_free(ObjectTable *table) {
    free(table->entries);
    free(table->slots);
}

/* Return the function by which objects of a type tell what they reference; NULL if they do not. */
Traverse traverse_of(Object type) { return (Traverse)py.Type_GetSlot(type, TP_TRAVERSE); }

/* Call `visit` for everything that an object references, until that returns something else than 0. */
int traverse(Object object, Visit visit, void *argument) {
    if (!py.Object_IS_GC(object)) return 0;
    Traverse function = traverse_of(type_of(object));
    return function ? function(object, visit, argument) : 0;
}
