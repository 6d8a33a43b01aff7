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
#include <string.h>

#define GENERATIONS 3
#define MOMENTS 3
#define ADDRESS(link) ((link) & ~(uintptr_t)3) /* the lowest bits of a link are flags */
#define FIRST_ROOM 1024

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
    Object moments[MOMENTS]; /* lists, created at the begin and at the last calls of census_advance */
} Census;

static Link *link_of(Object object) { return (Link *)object - 1; }
static Object object_of(Link *link) { return link + 1; }
static Link *before(const Link *link) { return (Link *)ADDRESS(link->previous); }
static Link *after(const Link *link) { return (Link *)ADDRESS(link->next); }

/* PyObject: the number of references is in the lower half of its first word, in some versions
   together with other things; its type is the second word. */
static int64_t references_to(Object object) { return *(uint32_t *)object; }
static Object type_of(Object object) { return ((Object *)object)[1]; }

/* Objects with two numbers each, in the order in which they were added. */
typedef struct {
    Object object;
    int64_t left;  /* references that are not accounted for yet */
    int64_t state; /* what the user of the table notes */
} Entry;

typedef struct {
    Entry *entries;
    uint32_t *slots; /* number of the entry + 1, or 0; at most half of them are used */
    size_t count, room, capacity;
} Table;

static uint32_t *slot_of(const Table *table, Object object) {
    size_t mask = table->capacity - 1;
    size_t at = ((uint64_t)(uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 20 & mask;
    while (table->slots[at] && table->entries[table->slots[at] - 1].object != object)
        at = (at + 1) & mask;
    return &table->slots[at];
}

static Entry *entry_of(const Table *table, Object object) {
    if (!table->capacity) return NULL;
    uint32_t number = *slot_of(table, object);
    return number ? &table->entries[number - 1] : NULL;
}

static int make_room(Table *table) {
    size_t room = table->room ? 2 * table->room : FIRST_ROOM;
    Entry *entries = realloc(table->entries, room * sizeof *entries);
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
static Entry *append(Table *table, Object object) {
    if (table->count == table->room && make_room(table)) return NULL;
    Entry *entry = &table->entries[table->count++];
    *entry = (Entry){object, references_to(object), 0};
    *slot_of(table, object) = (uint32_t)table->count;
    return entry;
}

static void free_table(Table *table) {
    free(table->entries);
    free(table->slots);
}

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

EXPORT void census_end(Census *census) {
    for (int i = 0; i < MOMENTS; i++)
        if (census->moments[i]) py._DecRef(census->moments[i]);
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

/* Add the objects that are behind one in the first generations to a table. */
static int64_t list_since(const Census *census, Object moment, int generations, Table *table) {
    for (int i = 0; i < generations; i++) {
        Link *end = &census->generations[i].link;
        for (Link *link = before(end); link != end; link = before(link)) {
            if (object_of(link) == moment) return (int64_t)table->count;
            if (!append(table, object_of(link))) return FAILED;
        }
    }
    return (int64_t)table->count;
}

static int subtract(Object object, void *table) {
    Entry *entry = entry_of(table, object);
    if (entry) entry->left--;
    return 0;
}

/* The numbers of entries that are still to be looked at. */
typedef struct {
    Table *table;
    uint32_t *numbers;
    size_t count;
} Reached;

static int reach(Object object, void *argument) {
    Reached *reached = argument;
    Entry *entry = entry_of(reached->table, object);
    if (!entry || entry->state) return 0;
    entry->state = 1;
    reached->numbers[reached->count++] = (uint32_t)(entry - reached->table->entries);
    return 0;
}

static int mark_reachable(Table *table) {
    Reached reached = {table, malloc((table->count + 1) * sizeof(uint32_t)), 0};
    if (!reached.numbers) return no_memory();
    for (size_t i = 0; i < table->count; i++) traverse(table->entries[i].object, subtract, table);
    for (size_t i = 0; i < table->count; i++) {
        if (table->entries[i].left > 0) reach(table->entries[i].object, &reached);
        while (reached.count)
            traverse(table->entries[reached.numbers[--reached.count]].object, reach, &reached);
    }
    free(reached.numbers);
    return 0;
}

/* Add to the list `found` the unreachable ones of the objects that were created after the begin, with
   `from` = 1 after the last call of census_advance but one, or with a negative number of all in so
   many generations, the youngest first. Returns how many were looked at. */
EXPORT int64_t census_unreachable(Census *census, int from, Object found) {
    Table table = {0};
    Object moment = from < 0 ? NULL : census->moments[from] ? census->moments[from] : census->moments[0];
    int64_t count = list_since(census, moment, from < 0 ? -from : GENERATIONS, &table);
    if (count >= 0 && mark_reachable(&table)) count = FAILED;
    for (size_t i = 0; count >= 0 && i < table.count; i++)
        if (!table.entries[i].state && py.List_Append(found, table.entries[i].object)) count = FAILED;
    free_table(&table);
    return count;
}

/* What is freed with garbage: objects to which only garbage has references. Of some types, only the
   caller knows what they reference; those are special. */
typedef struct {
    Table table;  /* objects that have lost references, or that are freed */
    Object bases; /* a tuple: these types and those derived from them are special, */
    void *special_traverse; /* and types that have this function */
    Object plain_type; /* the last type that was not special: most objects have few types */
    Object found;      /* a list: each special object, once for each reference that it has lost */
    Object *freed;     /* those that are still to be followed */
    size_t count, room;
} Release;

enum { COUNTED, FREED };

static int is_special(Release *release, Object object) {
    Object type = type_of(object);
    if (type == release->plain_type) return 0;
    if (release->special_traverse && traverse_of(type) == release->special_traverse) return 1;
    for (ptrdiff_t i = 0; i < py.Tuple_Size(release->bases); i++)
        if (py.Type_IsSubtype(type, py.Tuple_GetItem(release->bases, i))) return 1;
    release->plain_type = type;
    return 0;
}

static int note_freed_object(Release *release, Object object) {
    if (release->count == release->room) {
        size_t room = release->room ? 2 * release->room : FIRST_ROOM;
        Object *freed = realloc(release->freed, room * sizeof *freed);
        if (!freed) return no_memory();
        release->freed = freed;
        release->room = room;
    }
    release->freed[release->count++] = object;
    return 0;
}

/* Take note that an object has lost one of its references. */
static int lose(Object object, void *argument) {
    Release *release = argument;
    Entry *entry = entry_of(&release->table, object);
    if (!entry && !(entry = append(&release->table, object))) return FAILED;
    if (entry->state == FREED) return 0;
    entry->left--;
    if (is_special(release, object)) return py.List_Append(release->found, object);
    if (entry->left > 0) return 0;
    entry->state = FREED;
    return note_freed_object(release, object);
}

static int follow_freed(Release *release) {
    while (release->count)
        if (traverse(release->freed[--release->count], lose, release)) return FAILED;
    return 0;
}

EXPORT void release_end(Release *release) {
    free_table(&release->table);
    free(release->freed);
    free(release);
}

/* Begin to follow what is freed with the objects of the list `garbage`. Special are the types of a
   tuple, those derived from them, and those that are traversed as the type `like`, if it is not NULL.
   Special objects are added to the list `found`: those among the garbage, and others for each
   reference that they lose. The tuple and that list must exist as long as the result. */
EXPORT Release *release_begin(Object garbage, Object bases, Object like, Object found) {
    Release *release = calloc(1, sizeof *release);
    if (!release) return no_memory(), NULL;
    release->found = found;
    release->bases = bases;
    release->special_traverse = like ? traverse_of(like) : NULL;
    int failed = 0;
    for (ptrdiff_t i = 0; !failed && i < py.List_Size(garbage); i++) {
        Entry *entry = append(&release->table, py.List_GetItem(garbage, i));
        if (!entry) failed = 1;
        else entry->state = FREED;
    }
    for (ptrdiff_t i = 0; !failed && i < py.List_Size(garbage); i++) {
        Object object = py.List_GetItem(garbage, i);
        failed = is_special(release, object) ? py.List_Append(found, object) : note_freed_object(release, object);
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
        Entry *entry = entry_of(&release->table, object);
        if (!entry && !(entry = append(&release->table, object))) return FAILED;
        if ((size_t)(entry - release->table.entries) >= known) entry->left--;
    }
    return 0;
}

/* Return how many references an object has that was noted and that are not lost. */
EXPORT int64_t release_left(Release *release, Object object) {
    Entry *entry = entry_of(&release->table, object);
    return !entry || entry->state == FREED ? 0 : entry->left;
}

static int lose_unless_node(Object object, void *argument) {
    Release *release = argument;
    int is_node = release->special_traverse && traverse_of(type_of(object)) == release->special_traverse;
    return is_node ? 0 : lose(object, release);
}

/* Take note that a special object is freed, and follow what Python knows that it references. A tensor
   shows nodes of its graph that it does not reference: these are left out. */
EXPORT int release_free(Release *release, Object object) {
    Entry *entry = entry_of(&release->table, object);
    if (entry) entry->state = FREED;
    return traverse(object, lose_unless_node, release) || follow_freed(release) ? FAILED : 0;
}

/* Take note that an object that was noted has lost a reference of Python. */
EXPORT int release_lose(Release *release, Object object) {
    return lose(object, release) || follow_freed(release) ? FAILED : 0;
}
