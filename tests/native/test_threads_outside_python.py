"""Allocations of threads that cannot have the interpreter's lock: they are counted, and go on."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_cka_memory.meters import blocks
from pytest_cka_memory.meters.blocks.counter import Counter

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="requires gcc")

ADDRESS = 64
"""Nothing can be allocated so low in memory."""
BYTES = 10

HELPER = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

typedef int (*Add)(uint64_t address, int64_t bytes, int device, int is_new);
static Add add;

static void *allocate(void *address) {
    add((uintptr_t)address, 10, 0, 1);
    return NULL;
}

int allocate_in_thread(Add function, void *address) {
    struct timespec latest;
    pthread_t thread;
    add = function;
    clock_gettime(CLOCK_REALTIME, &latest);
    latest.tv_sec += 20;
    if (pthread_create(&thread, NULL, allocate, address)) return 0;
    return !pthread_timedjoin_np(thread, NULL, &latest);
}

void allocate_at_end(int (*is_ending)(void), Add function, void *address) {
    while (!is_ending()) usleep(1000);
    function((uintptr_t)address, 10, 0, 1);
    write(1, "counted\n", 8);
}
"""

ENDS = """
import ctypes, os, threading, time
from pytest_cka_memory.meters import blocks
from pytest_cka_memory.meters.blocks.counter import Counter

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1)

slow, region, python = Slow(), Counter().open(), ctypes.pythonapi
is_ending = getattr(python, "Py_IsFinalizing", None) or python._Py_IsFinalizing
add = blocks.functions().counter_add
functions = [ctypes.cast(function, ctypes.c_void_p) for function in (is_ending, add)]
allocate = ctypes.CDLL(os.environ["HELPER"]).allocate_at_end
threading.Thread(target=allocate, args=(*functions, ctypes.c_void_p(64)), daemon=True).start()
"""


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library in C whose threads allocate as those of torch do."""
    folder = tmp_path_factory.mktemp("helper")
    source, compiled = folder / "helper.c", folder / "libhelper.so"
    source.write_text(HELPER, encoding="utf-8")
    subprocess.run(["gcc", "-fPIC", "-shared", "-o", compiled, source, "-lpthread"], check=True)
    return compiled


@pytest.fixture(autouse=True)
def _removed(counter: Counter) -> Iterator[None]:
    yield
    counter.remove(ADDRESS)


def test_thread_without_python_does_not_wait_for_the_lock(counter: Counter, helper: Path) -> None:
    """A thread of C++ is counted while Python holds its lock, perhaps to wait for that thread."""
    allocate = ctypes.PyDLL(str(helper)).allocate_in_thread  # which keeps the lock
    add = ctypes.cast(blocks.functions().counter_add, ctypes.c_void_p)
    since = counter.figures().serial
    region = counter.open()
    has_ended = allocate(add, ctypes.c_void_p(ADDRESS))
    region.close()
    assert has_ended
    assert counter.retained_since(since) == BYTES


@pytest.mark.slow
def test_thread_that_allocates_while_python_ends_goes_on(
    run_code: Callable[..., str], helper: Path
) -> None:
    """At the end of Python no thread gets the lock, so an allocation must not ask for it."""
    assert run_code(ENDS, HELPER=str(helper)) == "counted\n"
