/* Put functions of our own in the place of those by which torch allocates and frees.

   A library calls functions of other libraries through a table of addresses (its GOT). Two entries
   of libc10.so, posix_memalign and free, are all the ways in which torch allocates and frees memory
   for CPU tensors. Allocators of accelerators and mapped files report what they do to torch's
   profiler, by one function of libc10.so that other libraries call through their tables. The allocator
   for pinned memory reports nothing, but its class has a table of virtual functions.

   While they report, they hold a lock, so that nothing may wait for Python. CUDA's and ROCm's ask for
   the current stream just before they take it: that is the moment to note Python's frames. */
#define _GNU_SOURCE
#include "counter.h"

#include <dlfcn.h>
#include <elf.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#define IS_FUNCTION(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__) /* written from the ABI's description; never run */
#define IS_FUNCTION(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#error "the counter is written for Linux on x86-64 and ARM64"
#endif

typedef struct { /* c10::Device */
    int8_t type, index;
} TorchDevice;

/* The functions that ours call, and those that they called first. */
static int (*real_memalign)(void **, size_t, size_t), (*first_memalign)(void **, size_t, size_t);
static void (*real_free)(void *), (*first_free)(void *);
static void (*real_resize)(void *, size_t), (*real_resize_cuda)(void *, size_t);
static void (*real_report)(void *, int64_t, size_t, size_t, TorchDevice);

/* A tool that has replaced one of ours may call ours from its own, which ours call once repaired:
   the inner call neither counts again nor calls that tool again. */
static __thread int calling;

static int counted_memalign(void **out, size_t alignment, size_t bytes) {
    if (calling) return first_memalign(out, alignment, bytes);
    calling = 1;
    int error = real_memalign(out, alignment, bytes);
    calling = 0;
    if (!error) block_allocated(*out, (int64_t)bytes, CPU_DEVICE, UNKNOWN, UNKNOWN);
    return error;
}

static void counted_free(void *address) {
    if (calling) {
        first_free(address);
        return;
    }
    /* Before it is freed, because another thread may get the same address at once. */
    if (address) block_freed(address, CPU_DEVICE, UNKNOWN, UNKNOWN);
    calling = 1;
    real_free(address);
    calling = 0;
}

static void counted_report(void *address, int64_t bytes, size_t level, size_t reserved, TorchDevice on) {
    int device = on.type == 0 ? CPU_DEVICE : on.type << 8 | (on.index & 0xff);
    int64_t known = on.type == 0 ? UNKNOWN : (int64_t)level;
    int64_t held = on.type == 0 ? UNKNOWN : (int64_t)reserved;
    if (device != CPU_DEVICE) note_thread_of_block();
    if (bytes > 0) block_allocated(address, bytes, device, known, held);
    else block_freed(address, device, known, held);
    real_report(address, bytes, level, reserved, on);
}

/* Moves a storage to a block of another size; what it had is not new. */
static void counted_resize(void *storage, size_t bytes) {
    move_begins();
    real_resize(storage, bytes);
    move_ends();
}

static void counted_resize_cuda(void *storage, size_t bytes) {
    move_begins();
    real_resize_cuda(storage, bytes);
    move_ends();
}

static void *(*real_save_thread)(void);

/* Called when an operator begins, and when Python frees a tensor. */
static void *noted_save_thread(void) {
    note_operator();
    lock_is_released(__builtin_frame_address(0));
    return real_save_thread();
}

static void (*real_restore_thread)(void *);

static void noted_restore_thread(void *thread) {
    lock_is_taken(__builtin_frame_address(0));
    real_restore_thread(thread);
}

typedef struct { /* c10::cuda::CUDAStream, which is returned in two registers */
    int64_t device, id;
} TorchStream;

static int (*real_device)(int8_t *);
static TorchStream (*real_stream)(int8_t);

/* CUDA's allocator asks for the current device and, some instructions later, for its stream. Others
   ask for streams too, also while they hold the lock, but not in this way. */
#define MOST_CODE_BETWEEN 128
static __thread uintptr_t device_asked_at;

static int noted_device(int8_t *out) {
    device_asked_at = (uintptr_t)__builtin_return_address(0);
    return real_device(out);
}

static TorchStream noted_stream(int8_t device) {
    uintptr_t since = (uintptr_t)__builtin_return_address(0) - device_asked_at;
    if (device >= 0 && since < MOST_CODE_BETWEEN) note_stack();
    return real_stream(device);
}

enum { IN_C10, OUTSIDE_C10, IN_CUDA }; /* one place each, so that no block is counted twice */

typedef struct {
    const char *name;
    void *ours;
    void **real;
    int place;
    void **first; /* NULL: nobody else is expected to replace it */
} Hook;

static const Hook hooks[] = {
    {"posix_memalign", (void *)counted_memalign, (void **)&real_memalign, IN_C10,
     (void **)&first_memalign},
    {"free", (void *)counted_free, (void **)&real_free, IN_C10, (void **)&first_free},
    {"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE", (void *)counted_report,
     (void **)&real_report, OUTSIDE_C10, NULL},
    {"_ZN2at6native16resize_bytes_cpuEPN3c1011StorageImplEm", (void *)counted_resize,
     (void **)&real_resize, OUTSIDE_C10, NULL},
    {"_ZN2at6native17resize_bytes_cudaEPN3c1011StorageImplEm", (void *)counted_resize_cuda,
     (void **)&real_resize_cuda, OUTSIDE_C10, NULL},
    {"PyEval_SaveThread", (void *)noted_save_thread, (void **)&real_save_thread, OUTSIDE_C10, NULL},
    {"PyEval_RestoreThread", (void *)noted_restore_thread, (void **)&real_restore_thread, OUTSIDE_C10,
     NULL},
    {"_ZN3c104cuda9GetDeviceEPa", (void *)noted_device, (void **)&real_device, IN_CUDA, NULL},
    {"_ZN3c104cuda20getCurrentCUDAStreamEa", (void *)noted_stream, (void **)&real_stream, IN_CUDA, NULL},
    {"_ZN3c103hip9GetDeviceEPa", (void *)noted_device, (void **)&real_device, IN_CUDA, NULL},
    {"_ZN3c103hip19getCurrentHIPStreamEa", (void *)noted_stream, (void **)&real_stream, IN_CUDA, NULL},
};

/* Looked up in the table of a class, not by its name. */
static const Hook pinned_hook = {"allocate", (void *)counted_pinned_allocate,
                                 (void **)&real_pinned_allocate, OUTSIDE_C10, NULL};

/* The entries that were replaced, to find out later whether they still are ours. */
#define MOST_ENTRIES 64
static struct {
    void **entry, *ours;
} replaced[MOST_ENTRIES];
static int replaced_count;

#define HOOKS (sizeof hooks / sizeof *hooks)

typedef struct {
    const ElfW(Sym) *symbols;
    const char *strings;
    const uint32_t *hash; /* NULL if the library has another kind of table, or none */
} Names;

/* The place of a name among the symbols that a library uses or defines; 0 if it does neither. The
   table is described in "GNU Hash ELF Sections" by A. Haddad: symbols before `first` are only used. */
static uint32_t symbol_named(const Names *names, const char *name) {
    const uint32_t *hash = names->hash;
    uint32_t buckets = hash[0], first = hash[1], filter_words = hash[2], value = 5381;
    for (uint32_t i = 1; i < first; i++)
        if (!strcmp(names->strings + names->symbols[i].st_name, name)) return i;
    for (const char *letter = name; *letter; letter++) value = value * 33 + (unsigned char)*letter;
    const uint32_t *bucket = hash + 4 + filter_words * (sizeof(ElfW(Addr)) / sizeof *hash);
    const uint32_t *chain = bucket + buckets;
    uint32_t i = buckets ? bucket[value % buckets] : 0;
    if (i < first) return 0;
    for (;; i++) {
        uint32_t entry = chain[i - first]; /* the lowest bit ends the bucket */
        if ((entry | 1) == (value | 1) && !strcmp(names->strings + names->symbols[i].st_name, name))
            return i;
        if (entry & 1) return 0;
    }
}

typedef struct {
    uintptr_t start, end;             /* the library in memory */
    uintptr_t readonly, readonly_end; /* what the loader protected after it had filled the tables */
    const ElfW(Dyn) *dynamic;
} Image;

/* `own`: the function, if the library itself defines it, or NULL. */
static int replace(void **entry, const Hook *hook, const Image *image, void *own) {
    void *before = *entry;
    if (before == hook->ours) return 1;
    /* Where functions are looked up at the first call, the entry still leads to that lookup, which
       would overwrite ours. */
    if ((uintptr_t)before >= image->start && (uintptr_t)before < image->end) {
        void *found = own ? own : dlsym(RTLD_DEFAULT, hook->name);
        if (found) before = found;
    }
    if (!before) return 0;
    uintptr_t page = (uintptr_t)entry & ~((uintptr_t)getpagesize() - 1);
    size_t length = (uintptr_t)(entry + 1) - page;
    if (mprotect((void *)page, length, PROT_READ | PROT_WRITE)) return 0;
    *hook->real = before;
    if (hook->first && !*hook->first) *hook->first = before;
    __atomic_store_n(entry, hook->ours, __ATOMIC_SEQ_CST);
    if (page >= image->readonly && (uintptr_t)entry < image->readonly_end)
        mprotect((void *)page, length, PROT_READ);
    for (int i = 0; i < replaced_count; i++)
        if (replaced[i].entry == entry) return 1;
    if (replaced_count < MOST_ENTRIES) {
        replaced[replaced_count].entry = entry;
        replaced[replaced_count++].ours = hook->ours;
    }
    return 1;
}

/* Return whether nobody has replaced our functions since. */
EXPORT int counter_is_intact(void) {
    for (int i = 0; i < replaced_count; i++)
        if (*replaced[i].entry != replaced[i].ours) return 0;
    return replaced_count > 0;
}

static Image image_of(const struct dl_phdr_info *info) {
    Image image = {UINTPTR_MAX, 0, 0, 0, NULL};
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + part->p_vaddr, end = start + part->p_memsz;
        if (part->p_type == PT_DYNAMIC) image.dynamic = (const void *)start;
        if (part->p_type == PT_LOAD && start < image.start) image.start = start;
        if (part->p_type == PT_LOAD && end > image.end) image.end = end;
        if (part->p_type == PT_GNU_RELRO) image.readonly = start, image.readonly_end = end;
    }
    return image;
}

/* The path of libtorch_cpu.so, once it was found. */
static char torch_path[PATH_MAX];

static int hook_library(struct dl_phdr_info *info, size_t size, void *count) {
    (void)size;
    const char *name = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
    if (!name || (strncmp(name, "/libc10", 7) && strncmp(name, "/libtorch", 9))) return 0;
    int is_c10 = !strcmp(name, "/libc10.so");
    int is_cuda = !strcmp(name, "/libc10_cuda.so") || !strcmp(name, "/libc10_hip.so");
    if (!strcmp(name, "/libtorch_cpu.so") && strlen(info->dlpi_name) < sizeof torch_path)
        strcpy(torch_path, info->dlpi_name);
    Image image = image_of(info);
    const ElfW(Dyn) *dynamic = image.dynamic;
    Names names = {NULL, NULL, NULL};
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    size_t sizes[2] = {0, 0};
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        /* glibc has added the library's address to these; musl has not. */
        uintptr_t at = dynamic->d_un.d_ptr;
        if (at < info->dlpi_addr) at += info->dlpi_addr;
        switch (dynamic->d_tag) {
        case DT_SYMTAB: names.symbols = (const void *)at; break;
        case DT_STRTAB: names.strings = (const void *)at; break;
        case DT_GNU_HASH: names.hash = (const void *)at; break;
        case DT_JMPREL: tables[0] = (const void *)at; break;
        case DT_PLTRELSZ: sizes[0] = dynamic->d_un.d_val; break;
        case DT_RELA: tables[1] = (const void *)at; break;
        case DT_RELASZ: sizes[1] = dynamic->d_un.d_val; break;
        }
    }
    if (!names.symbols || !names.strings) return 0;
    /* Looked up once, because a library of torch has some 100,000 entries. */
    uint32_t wanted[HOOKS] = {0};
    for (size_t h = 0; names.hash && h < HOOKS; h++) wanted[h] = symbol_named(&names, hooks[h].name);
    for (int t = 0; t < 2; t++)
        for (size_t i = 0; tables[t] && i < sizes[t] / sizeof *tables[t]; i++) {
            const ElfW(Rela) *entry = &tables[t][i];
            if (!IS_FUNCTION(ELF64_R_TYPE(entry->r_info))) continue;
            uint32_t number = ELF64_R_SYM(entry->r_info);
            for (size_t h = 0; h < HOOKS; h++) {
                int place = hooks[h].place;
                if (place == IN_CUDA ? !is_cuda : (place == IN_C10) != is_c10) continue;
                if (names.hash && wanted[h] != number) continue;
                const ElfW(Sym) *symbol = &names.symbols[number];
                if (strcmp(names.strings + symbol->st_name, hooks[h].name)) continue;
                void *own = symbol->st_value ? (void *)(info->dlpi_addr + symbol->st_value) : NULL;
                *(int *)count +=
                    replace((void **)(info->dlpi_addr + entry->r_offset), &hooks[h], &image, own);
            }
        }
    return 0;
}

/* c10::Allocator's table begins with two destructors; the third function is `allocate`. */
#define PLACE_OF_ALLOCATE 2

/* Return the entry for `allocate` of the accelerator's allocator for pinned memory; NULL if none is
   loaded. It is created when its library is loaded, so that asking for it uses no device. */
static void **pinned_entry(void) {
    static const int8_t accelerators[] = {1 /* CUDA and ROCm */, 12 /* XPU */};
    void *torch = *torch_path ? dlopen(torch_path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (!torch) return NULL;
    void ***(*allocator_of)(int8_t); /* at::getHostAllocator, from torch 2.8 on */
    *(void **)&allocator_of = dlsym(torch, "_ZN2at16getHostAllocatorEN3c1010DeviceTypeE");
    void ***allocator = NULL;
    for (size_t i = 0; allocator_of && !allocator && i < sizeof accelerators; i++)
        allocator = allocator_of(accelerators[i]);
    dlclose(torch);
    return allocator ? *allocator + PLACE_OF_ALLOCATE : NULL;
}

static int hook_pinned(struct dl_phdr_info *info, size_t size, void *entry) {
    (void)size;
    Image image = image_of(info);
    uintptr_t function = (uintptr_t)*(void **)entry;
    if ((uintptr_t)entry < image.start || (uintptr_t)entry >= image.end) return 0;
    if (function < image.start || function >= image.end) return 0;
    pinned_code_start = image.start;
    pinned_code_end = image.end;
    return replace((void **)entry, &pinned_hook, &image, (void *)function);
}

static int counts_pinned;

/* Return whether pinned memory is counted. */
EXPORT int counter_counts_pinned(void) { return counts_pinned; }

static void before_fork(void) {
    lock_stacks();
    lock_blocks();
    lock_pinned();
}

static void after_fork(void) {
    unlock_pinned();
    unlock_blocks();
    unlock_stacks();
}

/* Put the hooks into the libraries of torch that are loaded, again if somebody has replaced them;
   return how many are in place. Counting never stops: it costs some 50 ns an allocation. */
EXPORT int counter_install(void) {
    static int registered;
    if (!registered) registered = !pthread_atfork(before_fork, after_fork, after_fork);
    int count = 0;
    dl_iterate_phdr(hook_library, &count);
    void **entry = pinned_entry();
    find_emulated_device();
    find_graph_task(torch_path);
    find_operators(torch_path);
    if (entry && *entry != pinned_hook.ours) counts_pinned = dl_iterate_phdr(hook_pinned, entry);
    return count + counts_pinned;
}
