"""A forked process counts on its own, from what it has inherited."""

import os

import pytest

if not hasattr(os, "fork"):
    pytest.skip("this system has no fork", allow_module_level=True)

MEASURES = """
import os, sys
import torch
from pytest_cka_memory import MemoryProbe
old = torch.zeros(1000)
probe = MemoryProbe("cpu")
with probe.measure() as outer:
    kept = torch.zeros(10)
    child = os.fork()
    if child == 0:
        with probe.measure() as region:
            mine = torch.zeros(25)
            del old
        print(region.retained_bytes, region.net_bytes, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(outer.retained_bytes, outer.net_bytes)
"""

ALLOCATES_MEANWHILE = """
import gc, os, threading, warnings
import torch
from pytest_cka_memory import MemoryProbe
warnings.simplefilter("ignore")
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # the modules of torch, which each child would go through
probe, end = MemoryProbe("cpu"), threading.Event()

def allocate():
    while not end.is_set():
        torch.ones(1000) + 1

threads = [threading.Thread(target=allocate) for _ in range(2)]
with probe.measure():
    for thread in threads:
        thread.start()
    for _ in range(40):
        child = os.fork()
        if child == 0:
            with probe.measure() as region:
                kept = torch.zeros(25)
            os._exit(0 if region.retained_bytes == 100 else 1)
        assert os.waitpid(child, 0)[1] == 0
    end.set()
    for thread in threads:
        thread.join()
print("done")
"""


def test_parent_and_child_measure_independently(run_code) -> None:
    """A child forked inside a region and its parent both measure their own memory."""
    assert run_code(MEASURES, forked=True).split() == ["100", "-3900", "40", "40"]


@pytest.mark.slow
def test_a_child_that_is_forked_while_threads_allocate_does_not_hang(run_code) -> None:
    """A child forked while threads allocate gets free locks of the counter, and does not hang."""
    assert run_code(ALLOCATES_MEANWHILE, forked=True) == "done\n"
