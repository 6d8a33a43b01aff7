/* The objects of some types, by the functions of Python's stable API, found at run time.

   Called once per session, to count the tensors that existed before. In Python it would take 50 ms
   for 300,000 objects. The caller holds the interpreter's lock and does not lose it in between, so
   no other thread sees a reference from the list of all objects, which breaks e.g. a tuple that it
   is building. */
#include "python.h"

#define GROUPS 256 /* of types, by their addresses: most objects belong to a group without a type */

static unsigned group_of(Object type) { return (uintptr_t)type / 64 % GROUPS; }

static int is_among(Object type, Object types, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++)
        if (py.Tuple_GetItem(types, i) == type) return 1;
    return 0;
}

/* Return a new list of the objects in the list `get(*arguments)` whose type is in the tuple `types`;
   NULL with an exception if that failed. */
EXPORT Object objects_of_types(Object get, Object arguments, Object types) {
    char groups[GROUPS] = {0};
    ptrdiff_t kinds = py.Tuple_Size(types);
    for (ptrdiff_t i = 0; i < kinds; i++) groups[group_of(py.Tuple_GetItem(types, i))] = 1;

    Object found = py.List_New(0);
    Object all = found ? py.Object_CallObject(get, arguments) : NULL;
    int failed = !all;
    ptrdiff_t count = all ? py.List_Size(all) : 0;
    for (ptrdiff_t i = 0; i < count && !failed; i++) {
        Object item = py.List_GetItem(all, i);
        Object type = py.Object_Type(item);
        if (groups[group_of(type)] && is_among(type, types, kinds))
            failed = py.List_Append(found, item) != 0;
        py._DecRef(type);
    }
    if (all) py._DecRef(all);
    if (failed && found) py._DecRef(found);
    return failed ? NULL : found;
}
