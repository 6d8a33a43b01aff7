"""What Linux says of the threads of a process."""

import threading
from pathlib import Path

import pytest

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
    assert this_process.wait_until_asleep("nobody", seconds=0.1) is True
