"""Profilers and allocators that look at the same memory."""

import ctypes
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_cka_memory import DeviceError, MemoryProbe
from pytest_cka_memory.meters.blocks import counter

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="requires gcc")

# Replaces entries of the table by which libc10.so calls other libraries, as memory profilers do.
TOOL = r"""
#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int (*Memalign)(void **, size_t, size_t);
static Memalign before;
static void **entry;
int calls;

static int tool_memalign(void **out, size_t alignment, size_t bytes) {
    calls++;
    return before(out, alignment, bytes);
}

static int find(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    const char *name = strrchr(info->dlpi_name, '/');
    if (!name || strcmp(name, "/libc10.so")) return 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    size_t sizes[2] = {0, 0};
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        void *at = (void *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_SYMTAB) symbols = at;
        if (dynamic->d_tag == DT_STRTAB) strings = at;
        if (dynamic->d_tag == DT_JMPREL) tables[0] = at;
        if (dynamic->d_tag == DT_PLTRELSZ) sizes[0] = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_RELA) tables[1] = at;
        if (dynamic->d_tag == DT_RELASZ) sizes[1] = dynamic->d_un.d_val;
    }
    for (int t = 0; t < 2; t++)
        for (size_t i = 0; i < sizes[t] / sizeof(ElfW(Rela)); i++) {
            const char *function = strings + symbols[ELF64_R_SYM(tables[t][i].r_info)].st_name;
            if (!strcmp(function, "posix_memalign"))
                entry = (void **)(info->dlpi_addr + tables[t][i].r_offset);
        }
    return 1;
}

static void put(void *function) {
    void *page = (void *)((size_t)entry & ~(size_t)4095);
    mprotect(page, 4096, PROT_READ | PROT_WRITE);
    *entry = function;
}

void take_over(void) {
    dl_iterate_phdr(find, NULL);
    before = (Memalign)*entry;
    put((void *)tool_memalign);
}

void take_over_without_calling(void) {
    take_over();
    before = posix_memalign;
}

void give_back(void *function) { put(function); }
void *current(void) { dl_iterate_phdr(find, NULL); return *entry; }
"""

# A malloc that hands out memory and never takes it back.
ALLOCATOR = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define SIZE (8ul << 30)
static char *arena;
static size_t used;
int aligned_calls;

static void *take(size_t bytes, size_t alignment) {
    if (!arena) {
        char *made = mmap(NULL, SIZE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        char *none = NULL;
        if (made == MAP_FAILED) return NULL;
        __atomic_compare_exchange_n(&arena, &none, made, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    if (alignment < 16) alignment = 16;
    size_t at = __atomic_fetch_add(&used, bytes + alignment + 16, __ATOMIC_SEQ_CST) + 16;
    if (at + bytes + alignment > SIZE) return NULL;
    char *found = (char *)(((uintptr_t)arena + at + alignment - 1) & ~(alignment - 1));
    ((size_t *)found)[-1] = bytes;
    return found;
}

void *malloc(size_t bytes) { return take(bytes, 16); }
void free(void *address) { (void)address; }
void *calloc(size_t count, size_t bytes) { return take(count * bytes, 16); }
void *realloc(void *old, size_t bytes) {
    void *found = take(bytes, 16);
    if (!old || !found) return found;
    size_t known = ((size_t *)old)[-1];
    return memcpy(found, old, known < bytes ? known : bytes);
}
void *memalign(size_t alignment, size_t bytes) { return take(bytes, alignment); }
void *aligned_alloc(size_t alignment, size_t bytes) { return take(bytes, alignment); }
size_t malloc_usable_size(void *address) { return address ? ((size_t *)address)[-1] : 0; }
int posix_memalign(void **out, size_t alignment, size_t bytes) {
    aligned_calls++;
    *out = take(bytes, alignment);
    return *out ? 0 : ENOMEM;
}
"""
PRELOADED = """
import ctypes
import torch
from pytest_cka_memory import MemoryProbe
calls = ctypes.c_int.in_dll(ctypes.CDLL(None), "aligned_calls")
probe = MemoryProbe("cpu")
before = calls.value
with probe.measure() as region:
    kept = torch.zeros(1000)
    torch.zeros(2000)
print(type(probe.meter).__name__, region.retained_bytes, region.peak_increase_bytes)
print(calls.value > before)
"""


def built(text: str, folder: Path, name: str) -> Path:
    """Compile a library."""
    source, library = folder / f"{name}.c", folder / f"lib{name}.so"
    source.write_text(text, encoding="utf-8")
    command = ["gcc", "-O1", "-fPIC", "-shared", "-fno-builtin", "-o", library, source]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="session")
def tool_library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    library = ctypes.CDLL(str(built(TOOL, tmp_path_factory.mktemp("tool"), "tool")))
    library.current.restype = ctypes.c_void_p
    library.give_back.argtypes = [ctypes.c_void_p]
    return library


@pytest.fixture
def tool(tool_library: Any, probe: MemoryProbe) -> Iterator[Any]:
    """A tool that can take over the counter's function; the test leaves the counter's there."""
    assert counter.is_intact()
    ours = tool_library.current()
    yield tool_library
    tool_library.give_back(ours)
    assert counter.is_intact()


def leak() -> tuple[int, int, torch.UntypedStorage]:
    before = counter.Counter().figures()
    kept = torch.UntypedStorage(100)
    after = counter.Counter().figures()
    return after.level - before.level, after.serial - before.serial, kept


@needs_compiler
def test_a_tool_that_has_taken_over_is_no_obstacle_to_the_next_region(
    tool: Any, probe: MemoryProbe
) -> None:
    """If another tool has replaced the allocator, the counter goes before it and calls it."""
    tool.take_over()
    assert not counter.is_intact()
    calls = ctypes.c_int.in_dll(tool, "calls")
    with probe.measure() as region:
        assert counter.is_intact()
        before = calls.value
        kept = torch.UntypedStorage(100)
        assert calls.value == before + 1
    assert region.retained_bytes == region.net_bytes == region.peak_increase_bytes == len(kept)


@needs_compiler
def test_a_tool_that_is_called_first_and_calls_the_counter_changes_no_figure(tool: Any) -> None:
    """If a tool is called first and then calls the counter, each allocation is counted once."""
    tool.take_over()
    assert leak()[:2] == (100, 1)


@needs_compiler
def test_a_region_in_which_a_tool_has_taken_over_is_an_error(tool: Any, probe: MemoryProbe) -> None:
    """If a tool takes over within a region, nothing is counted, so it is an error; the next is
    right.
    """
    with pytest.raises(DeviceError, match="can no longer be measured"), probe.measure():
        tool.take_over_without_calling()
    assert leak()[:2] == (0, 0)
    with probe.measure() as region:
        kept = torch.UntypedStorage(100)
    assert region.retained_bytes == region.net_bytes == len(kept)


@pytest.mark.slow
@needs_compiler
def test_a_preloaded_allocator_is_counted(run_code: Callable[..., str], tmp_path: Path) -> None:
    """An allocator that is preloaded, such as jemalloc, gets torch's calls through the counter."""
    library = built(ALLOCATOR, tmp_path, "allocator")
    printed = run_code(PRELOADED, LD_PRELOAD=str(library), CKA_MEMORY_NATIVE="1").split()
    assert printed == ["BlockMeter", "4000", "12000", "True"]


def test_figures_are_the_same_under_tracemalloc(probe: MemoryProbe) -> None:
    """Tracemalloc counts Python's memory, in which tensors have no data; figures stay the same."""
    tracemalloc.start()
    try:
        with probe.measure() as region:
            kept = torch.zeros(1000)
    finally:
        tracemalloc.stop()
    assert region.retained_bytes == region.peak_increase_bytes == kept.nbytes


def test_figures_are_the_same_under_the_profiler_of_torch(probe: MemoryProbe) -> None:
    """The profiler of torch and the counter both get every allocation."""
    with torch.profiler.profile(profile_memory=True) as profiler, probe.measure() as region:
        kept = torch.zeros(1000)
        torch.from_numpy(kept.numpy()).share_memory_()
    assert region.retained_bytes == kept.nbytes
    assert sum(row.self_cpu_memory_usage for row in profiler.key_averages()) > 0
