/* Functions of Python, found at run time, and what the files that use them share. */
#ifndef CKA_MEMORY_PYTHON_H
#define CKA_MEMORY_PYTHON_H

#include "counter.h"

typedef void *Object;

/* Functions of Python, whose names begin with Py. */
#define PYTHON(X) \
    X(int, GILState_Ensure, (void)) \
    X(void, GILState_Release, (int)) \
    X(Object, GILState_GetThisThreadState, (void)) \
    X(int, GILState_Check, (void)) \
    X(Object, ThreadState_Get, (void)) \
    X(Object, ThreadState_GetFrame, (Object)) \
    X(Object, Frame_GetBack, (Object)) \
    X(Object, Frame_GetCode, (Object)) \
    X(Object, Object_GetAttrString, (Object, const char *)) \
    X(const char *, Unicode_AsUTF8AndSize, (Object, ptrdiff_t *)) \
    X(void, Err_Fetch, (Object *, Object *, Object *)) \
    X(void, Err_Restore, (Object, Object, Object)) \
    X(int, GC_Disable, (void)) \
    X(int, GC_Enable, (void)) \
    X(void, _DecRef, (Object)) \
    X(long, Long_AsLong, (Object)) \
    X(Object, Object_GenericGetAttr, (Object, Object)) \
    X(Object, Unicode_FromString, (const char *)) \
    X(unsigned long, Type_GetFlags, (Object)) \
    X(int, Dict_Next, (Object, ptrdiff_t *, Object *, Object *)) \
    X(Object, Object_CallObject, (Object, Object)) \
    X(Object, Object_CallFunctionObjArgs, (Object, ...)) \
    X(Object, Object_GetAttr, (Object, Object)) \
    X(Object, Object_Type, (Object)) \
    X(int, Object_IS_GC, (Object)) \
    X(int, Object_GC_IsTracked, (Object)) \
    X(void *, Type_GetSlot, (Object, int)) \
    X(int, Type_IsSubtype, (Object, Object)) \
    X(Object, List_New, (ptrdiff_t)) \
    X(ptrdiff_t, List_Size, (Object)) \
    X(Object, List_GetItem, (Object, ptrdiff_t)) \
    X(int, List_Append, (Object, Object)) \
    X(ptrdiff_t, Tuple_Size, (Object)) \
    X(Object, Tuple_GetItem, (Object, ptrdiff_t)) \
    X(Object, Err_NoMemory, (void)) \
    X(void, _IncRef, (Object)) \
    X(Object, Sys_GetObject, (const char *))
extern struct PythonFunctions {
    PYTHON(FUNCTION_FIELD)
} py;

/* stacks.c */
Object module_of_frame(Object frame);

/* callers.c: the caller of both holds the interpreter's lock. */
int runs_for_another_thread(void);
Object frame_that_waits(void);

/* references.c: the caller holds the interpreter's lock. */

#define FAILED (-1) /* with an exception: there is no memory */

typedef int (*Visit)(Object, void *);
typedef int (*Traverse)(Object, Visit, void *);

/* Addresses, in a table of which at most half is used. */
typedef struct {
    Object *slots;
    size_t capacity, count;
} Set;

/* An object with numbers that the user of a table notes. */
typedef struct {
    Object object;
    int64_t left; /* at first how many references the object has */
    int32_t lost;
    int16_t depth;
    int16_t state;
} ObjectEntry;

/* Entries in the order in which they were added. */
typedef struct {
    ObjectEntry *entries;
    uint32_t *slots; /* number of the entry + 1, or 0; at most half of them are used */
    size_t count, room, capacity;
    uintptr_t lowest, highest; /* address of any entry: most others, such as types, are outside */
} ObjectTable;

/* PyObject: the number of references is in the lower half of its first word, in some versions
   together with other things; its type is the second word. */
static inline int64_t references_to(Object object) { return *(uint32_t *)object; }
static inline Object type_of(Object object) { return ((Object *)object)[1]; }

int set_has(const Set *set, Object object);
int set_add(Set *set, Object object);
void set_clear(Set *set);
ObjectEntry *table_entry(const ObjectTable *table, Object object);
ObjectEntry *table_append(ObjectTable *table, Object object);
void table_free(ObjectTable *table);
int no_memory(void);
int traverse(Object object, Visit visit, void *argument);
Traverse traverse_of(Object type);

/* modules.c: the caller holds the interpreter's lock. */
void name_module(Object module);
void forget_modules(void);

#endif
