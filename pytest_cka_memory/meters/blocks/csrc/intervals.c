/* Ordered sets of intervals of addresses, in which any number may overlap or be equal.

   A set is a treap: a search tree by start and end, and a heap by random priorities, which keep it
   balanced. Each node knows how far the intervals below it reach, so that what covers an address is
   found without looking at all intervals that begin before it. */
#include "intervals.h"

#include <stdlib.h>

#define FIRST_SIZE 64

static int is_before(const Interval *item, uintptr_t start, uintptr_t end) {
    return item->start < start || (item->start == start && item->end < end);
}

static void update(Interval *items, uint32_t at) {
    Interval *item = &items[at];
    uintptr_t left = items[item->left].reach, right = items[item->right].reach;
    item->reach = item->end;
    if (left > item->reach) item->reach = left;
    if (right > item->reach) item->reach = right;
}

/* Divide a tree into the intervals before one and the others. */
static void divide(Interval *items, uint32_t at, const Interval *by, uint32_t *before, uint32_t *others) {
    if (!at) {
        *before = *others = 0;
        return;
    }
    if (is_before(&items[at], by->start, by->end)) {
        divide(items, items[at].right, by, &items[at].right, others);
        *before = at;
    } else {
        divide(items, items[at].left, by, before, &items[at].left);
        *others = at;
    }
    update(items, at);
}

/* Join two trees, of which the first is before the second. */
static uint32_t join(Interval *items, uint32_t first, uint32_t second) {
    if (!first || !second) return first + second;
    uint32_t root = items[first].priority > items[second].priority ? first : second;
    if (root == first) items[root].right = join(items, items[first].right, second);
    else items[root].left = join(items, first, items[second].left);
    update(items, root);
    return root;
}

static uint32_t insert(Interval *items, uint32_t at, uint32_t new) {
    Interval *item = &items[new];
    if (!at || item->priority > items[at].priority) {
        divide(items, at, item, &item->left, &item->right);
        at = new;
    } else {
        uint32_t *side = is_before(item, items[at].start, items[at].end) ? &items[at].left : &items[at].right;
        *side = insert(items, *side, new);
    }
    update(items, at);
    return at;
}

static uint32_t take_out(Interval *items, uint32_t at, uint32_t old) {
    if (at == old) return join(items, items[at].left, items[at].right);
    uint32_t *side =
        is_before(&items[old], items[at].start, items[at].end) ? &items[at].left : &items[at].right;
    *side = take_out(items, *side, old);
    update(items, at);
    return at;
}

static uint32_t find(const Intervals *set, uintptr_t start, uintptr_t end) {
    uint32_t at = set->root;
    while (at && (set->items[at].start != start || set->items[at].end != end))
        at = is_before(&set->items[at], start, end) ? set->items[at].right : set->items[at].left;
    return at;
}

static int grow(Intervals *set) {
    uint32_t size = set->size ? 2 * set->size : FIRST_SIZE;
    Interval *more = realloc(set->items, size * sizeof *more);
    if (!more) return 0;
    if (!set->size) more[0] = (Interval){0};
    set->items = more;
    set->size = size;
    if (!set->used) set->used = 1;
    return 1;
}

static uint32_t random_number(void) {
    static uint32_t state = 2463534242u; /* G. Marsaglia, "Xorshift RNGs", 2003 */
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
}

/* Add an interval, once more if it was added before. Return 0 if there is no memory. */
int intervals_add(Intervals *set, uintptr_t start, uintptr_t end) {
    uint32_t at = find(set, start, end);
    if (at) {
        set->items[at].count++;
        return 1;
    }
    if (!set->unused && set->used >= set->size && !grow(set)) return 0;
    at = set->unused;
    if (at) set->unused = set->items[at].left;
    else at = set->used++;
    set->items[at] = (Interval){start, end, end, 0, 0, random_number(), 1};
    set->root = insert(set->items, set->root, at);
    return 1;
}

/* Undo one addition of an interval. Return 0 if it is not in the set. */
int intervals_remove(Intervals *set, uintptr_t start, uintptr_t end) {
    uint32_t at = find(set, start, end);
    if (!at) return 0;
    if (--set->items[at].count) return 1;
    set->root = take_out(set->items, set->root, at);
    set->items[at].left = set->unused;
    set->unused = at;
    return 1;
}

void intervals_clear(Intervals *set) {
    set->root = set->unused = 0;
    set->used = set->size ? 1 : 0;
}

/* Return the highest end of the intervals that begin at or before an address; 0 if none does. */
uintptr_t reach_from(const Intervals *set, uintptr_t address) {
    uintptr_t reach = 0;
    for (uint32_t at = set->root; at;) {
        const Interval *item = &set->items[at];
        if (item->start > address) {
            at = item->left;
            continue;
        }
        if (item->end > reach) reach = item->end;
        if (set->items[item->left].reach > reach) reach = set->items[item->left].reach;
        at = item->right;
    }
    return reach;
}

/* Return where the next interval after an address begins; UINTPTR_MAX if there is none. */
uintptr_t next_start(const Intervals *set, uintptr_t address) {
    uintptr_t next = UINTPTR_MAX;
    for (uint32_t at = set->root; at;) {
        const Interval *item = &set->items[at];
        if (item->start > address) next = item->start;
        at = item->start > address ? item->left : item->right;
    }
    return next;
}

/* Return the last interval that begins at or before an address; NULL if there is none. */
const Interval *last_start(const Intervals *set, uintptr_t address) {
    const Interval *last = NULL;
    for (uint32_t at = set->root; at;) {
        const Interval *item = &set->items[at];
        if (item->start <= address) last = item;
        at = item->start <= address ? item->right : item->left;
    }
    return last;
}

static uint32_t overlapping(const Interval *items, uint32_t at, uintptr_t start, uintptr_t end, uint32_t most) {
    if (!at || items[at].reach <= start) return 0;
    uint32_t count = overlapping(items, items[at].left, start, end, most);
    if (items[at].start >= end) return count;
    if (items[at].end > start) count += items[at].count;
    return count >= most ? count : count + overlapping(items, items[at].right, start, end, most - count);
}

/* Return how many intervals overlap one; beyond `most` it stops counting. */
uint32_t count_overlapping(const Intervals *set, uintptr_t start, uintptr_t end, uint32_t most) {
    return overlapping(set->items, set->root, start, end, most);
}
