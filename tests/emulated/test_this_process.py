"""What Linux says of the threads of a process."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from emulated_cuda import this_process

NAME = "of_a_test"


@pytest.fixture
def computing():
    """Yield an event at which a thread called `NAME` ceases to compute, and then sleeps."""
    enough, end, named = threading.Event(), threading.Event(), threading.Event()

    def compute() -> None:
        file = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        file.write_text(NAME, "utf-8")
        named.set()
        while not enough.is_set():
            pass
        end.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    named.wait()
    yield enough
    enough.set()
    end.set()
    thread.join()


def test_thread_that_computes_is_not_asleep(computing):
    """The wait ends without success while a thread of that name has work."""
    assert this_process.wait_until_asleep(NAME, seconds=0.1) is False
    computing.set()
    assert this_process.wait_until_asleep(NAME, seconds=60) is True


def test_other_threads_may_compute(computing):
    """Threads of other names do not matter, and that there is none of the name is enough."""
    assert not computing.is_set()
    assert this_process.wait_until_asleep("nobody", seconds=30) is True


@pytest.mark.emulates
def test_section_of_a_library_is_where_it_is_loaded():
    """Each fat binary of kernels begins with a number that says so."""
    assert torch.version.cuda is not None
    address = this_process.address_of_section("libtorch_cuda.so", ".nvFatBinSegment")
    assert ctypes.c_uint32.from_address(address).value == 0x466243B1


@pytest.mark.parametrize(
    ("library", "name"), [("libnone.so", ".text"), ("libc10.so", ".tex"), ("libc10.so", ".text2")]
)
def test_section_that_is_not_there_has_no_address(library, name):
    """Nothing is read then."""
    assert this_process.address_of_section(library, name) is None
