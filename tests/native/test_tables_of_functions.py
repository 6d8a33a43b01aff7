"""The tables of functions of torch's libraries, of which the counter replaces some entries."""

from collections.abc import Callable

import pytest

LAZY = """
import os, sys
sys.setdlopenflags(os.RTLD_LAZY)
import torch
from pytest_cka_memory import MemoryProbe
probe, old = MemoryProbe("cpu"), [torch.zeros(100) for _ in range(3)]
with probe.measure() as region:
    for tensor in old:
        tensor.resize_(150)
print(type(probe.meter).__name__, region.retained_bytes)
"""
PROTECTED = """
import torch
from pytest_cka_memory.meters.blocks.counter import Counter

def writable():
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file if "/libtorch" in line or "/libc10" in line]
    return [(line[0], line[-1]) for line in lines if "w" in line[1]]

before = writable()
assert before
Counter()
print(sorted(set(writable()) - set(before)))
"""


@pytest.mark.slow
def test_functions_that_are_looked_up_at_their_first_call_are_replaced_for_good(
    run_code: Callable[..., str],
) -> None:
    """Libraries may look a function up when they call it first, which must not undo the counting.

    Python has everything looked up when a library is loaded, unless a program sets flags for it.
    """
    assert run_code(LAZY, CKA_MEMORY_NATIVE="1").split() == ["BlockMeter", "600"]


def test_tables_that_the_loader_has_protected_stay_protected(run_code: Callable[..., str]) -> None:
    """The counter leaves no page of torch's libraries writable that was not before."""
    assert run_code(PROTECTED, forked=True) == "[]\n"
