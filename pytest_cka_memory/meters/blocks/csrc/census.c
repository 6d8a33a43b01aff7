/* Which objects are garbage in reference cycles, without collecting them.

   The rule is that of Python's collector: of all references to an object, those from the objects that
   are looked at are subtracted. What is left comes from elsewhere: the object is in use, and so is
   everything that it leads to. The rest is unreachable. A census changes nothing, so it can be taken
   while a program runs, and it looks only at what was created after a moment: older objects count as
   in use.

   The objects created after a moment are found in the collector's own lists, behind an object that was
   created at that moment and that this file references. A collection moves objects that it reaches
   late to the end of its list, but never one that is referenced from elsewhere, so no younger object
   is ever before that one; some older ones may be behind it, which does no harm. The lists are
   a part of CPython that has not changed from 3.8 to 3.13 (Include/internal/pycore_gc.h), and census_begin verifies
   that they are as described below. The caller holds the interpreter's lock. */
#include "python.h"

#include <stdlib.h>

#define GENERATIONS 3
#define MOMENTS 3
#define KNOWN_TYPES 64
#define MOST_LEFT_OUT 4
#define ADDRESS(link) ((link) & ~(uintptr_t)3) /* the lowest bits of a link are flags */

/* In front of each object: PyGC_Head. */
typedef struct {
    uintptr_t next, previous;
} Link;

/* struct gc_generation: a list of objects, the first of which is after `link`. */
typedef struct {
    Link link;
    int threshold, count;
} Generation;

typedef struct {
    Generation *generations;
    Object moments[MOMENTS]; /* lists, created at the start and at the last calls of census_advance */
    Set found;
} Census;

static Link *link_of(Object object) { return (Link *)object - 1; }
static Object object_of(Link *link) { return link + 1; }
static Link *before(const Link *link) { return (Link *)ADDRESS(link->previous); }
static Link *after(const Link *link) { return (Link *)ADDRESS(link->next); }

static int is_as_described(const Generation *generations, const int thresholds[GENERATIONS]) {
    for (int i = 0; i < GENERATIONS; i++) {
        const Link *link = &generations[i].link;
        if (generations[i].threshold != thresholds[i]) return 0;
        if (before(after(link)) != link || after(before(link)) != link) return 0;
    }
    return 1;
}

/* Return the collector's lists, which a new list is in; NULL if they are not as described above. */
static Generation *generations_with(Object newest, const int thresholds[GENERATIONS]) {
    /* The newest object is the last of the first generation. */
    Generation *generations = (Generation *)after(link_of(newest));
    if (before(&generations->link) != link_of(newest)) return NULL;
    return is_as_described(generations, thresholds) ? generations : NULL;
}

/* Begin a census of the objects that are created from now on. The arguments are those that
   gc.get_threshold() returns. NULL if the collector's lists are not as described above, or with an
   exception if there is no memory. */
EXPORT Census *census_begin(int first, int second, int third) {
    const int thresholds[GENERATIONS] = {first, second, third};
    Census *census = calloc(1, sizeof *census);
    if (!census) return no_memory(), NULL;
    census->moments[0] = py.List_New(0);
    census->generations = census->moments[0] ? generations_with(census->moments[0], thresholds) : NULL;
    if (census->generations) return census;
    if (census->moments[0]) py._DecRef(census->moments[0]);
    free(census);
    return NULL;
}

/* Return where the collector counts the objects that were created since it ran: above the threshold,
   it runs. Arguments and result NULL are those of census_begin. */
EXPORT int *collector_count(int first, int second, int third) {
    const int thresholds[GENERATIONS] = {first, second, third};
    Object newest = py.List_New(0);
    if (!newest) return NULL;
    Generation *generations = generations_with(newest, thresholds);
    py._DecRef(newest);
    return generations ? &generations->count : NULL;
}

/* Whether `earlier` is found among so many objects that are before the begin of a census. */
static int is_near(const Census *census, Object earlier, int most) {
    Link *link = before(link_of(census->moments[0]));
    while (most-- >= 0) {
        for (int i = 0; i < GENERATIONS - 1; i++) /* before the first of a list are the older ones */
            if (link == &census->generations[i].link) link = before(&census->generations[i + 1].link);
        if (link == &census->generations[GENERATIONS - 1].link) return 0;
        if (object_of(link) == earlier) return 1;
        link = before(link);
    }
    return 0;
}

/* Move the begin of a census back to that of an earlier one, if at most so many objects are between. */
EXPORT void census_reach_back(Census *census, const Census *earlier, int most) {
    if (!is_near(census, earlier->moments[0], most)) return;
    py._IncRef(earlier->moments[0]);
    py._DecRef(census->moments[0]);
    census->moments[0] = earlier->moments[0];
}

EXPORT void census_end(Census *census) {
    for (int i = 0; i < MOMENTS; i++)
        if (census->moments[i]) py._DecRef(census->moments[i]);
    set_clear(&census->found);
    free(census);
}

/* Remember this moment as the last, and the last so far as the one before. */
EXPORT int census_advance(Census *census) {
    Object moment = py.List_New(0);
    if (!moment) return FAILED;
    Object dropped = census->moments[1];
    census->moments[1] = census->moments[2];
    census->moments[2] = moment;
    if (dropped) py._DecRef(dropped);
    return 0;
}

static Object left_out[MOST_LEFT_OUT];

/* Look at no object of a type any more. They must not reference anything that could be garbage. */
EXPORT void census_leave_out(Object type) {
    for (int i = 0; i < MOST_LEFT_OUT; i++)
        if (left_out[i] == type) return;
    Object oldest = left_out[MOST_LEFT_OUT - 1];
    for (int i = MOST_LEFT_OUT - 1; i; i--) left_out[i] = left_out[i - 1];
    py._IncRef(type);
    left_out[0] = type;
    if (oldest) py._DecRef(oldest);
}

static int is_left_out(Object object) {
    for (int i = 0; i < MOST_LEFT_OUT && left_out[i]; i++)
        if (type_of(object) == left_out[i]) return 1;
    return 0;
}

/* Add the objects that are behind one in the first generations to a table. */
static int64_t list_since(const Census *census, Object moment, int generations, ObjectTable *table) {
    for (int i = 0; i < generations; i++) {
        Link *end = &census->generations[i].link;
        for (Link *link = before(end); link != end; link = before(link)) {
            if (object_of(link) == moment) return (int64_t)table->count;
            if (is_left_out(object_of(link))) continue;
            if (!table_append(table, object_of(link))) return FAILED;
        }
    }
    return (int64_t)table->count;
}

/* Whether a census of all since the begin looks at no more than so many objects. */
EXPORT int census_is_small(const Census *census, int most) {
    for (int i = 0; i < GENERATIONS; i++) {
        const Link *end = &census->generations[i].link;
        for (const Link *link = before(end); link != end; link = before(link)) {
            if (link + 1 == census->moments[0]) return 1;
            if (--most < 0) return 0;
        }
    }
    return 1;
}

/* The functions that tell what objects of some types reference; the types exist during a census. */
typedef struct {
    Object type;
    Traverse function;
} Known;

static void ask(Known known[KNOWN_TYPES], Object object, Visit visit, void *argument) {
    Object type = type_of(object);
    Known *last = &known[(uintptr_t)type / 64 % KNOWN_TYPES];
    if (last->type != type) *last = (Known){type, traverse_of(type)};
    if (last->function) last->function(object, visit, argument);
}

static int subtract(Object object, void *table) {
    ObjectEntry *entry = table_entry(table, object);
    if (entry) entry->left--;
    return 0;
}

/* The numbers of entries that are still to be looked at. */
typedef struct {
    ObjectTable *table;
    uint32_t *numbers;
    size_t count;
} Reached;

static int reach(Object object, void *argument) {
    Reached *reached = argument;
    ObjectEntry *entry = table_entry(reached->table, object);
    if (!entry || entry->state) return 0;
    entry->state = 1;
    reached->numbers[reached->count++] = (uint32_t)(entry - reached->table->entries);
    return 0;
}

static int mark_reachable(ObjectTable *table) {
    Reached reached = {table, malloc((table->count + 1) * sizeof(uint32_t)), 0};
    if (!reached.numbers) return no_memory();
    Known known[KNOWN_TYPES] = {{0}};
    for (size_t i = 0; i < table->count; i++) ask(known, table->entries[i].object, subtract, table);
    for (size_t i = 0; i < table->count; i++) {
        if (table->entries[i].left > 0) reach(table->entries[i].object, &reached);
        while (reached.count)
            ask(known, table->entries[reached.numbers[--reached.count]].object, reach, &reached);
    }
    free(reached.numbers);
    return 0;
}

/* Add to the list `found` the unreachable ones of the objects that were created after the begin, with
   `from` = 1 after the last call of census_advance but one, or with a negative number of all in so
   many generations, the youngest first. Those that were not found since the last call of census_forget
   are added to the list `fresh` as well, unless it is NULL. Returns how many were looked at. */
EXPORT int64_t census_unreachable(Census *census, int from, Object found, Object fresh) {
    ObjectTable table = {0};
    Object moment = from < 0 ? NULL : census->moments[from] ? census->moments[from] : census->moments[0];
    int64_t count = list_since(census, moment, from < 0 ? -from : GENERATIONS, &table);
    if (count >= 0 && mark_reachable(&table)) count = FAILED;
    for (size_t i = 0; count >= 0 && i < table.count; i++) {
        Object object = table.entries[i].object;
        if (table.entries[i].state) continue;
        if (py.List_Append(found, object)) count = FAILED;
        else if (fresh) {
            int is_fresh = set_add(&census->found, object);
            if (is_fresh < 0 || (is_fresh && py.List_Append(fresh, object))) count = FAILED;
        }
    }
    table_free(&table);
    return count;
}

/* Forget which objects were found: since any were collected, others may be where they were. */
EXPORT void census_forget(Census *census) { set_clear(&census->found); }
