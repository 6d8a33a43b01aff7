"""Pinned and registered memory is resident at once, as the driver makes it."""

import pytest

PINNED = """
import mmap, sys, tempfile
import emulated_cuda
emulated_cuda.load("a100", values=sys.argv[1] == "on")
import numpy, psutil, torch

MB = 2**20
def resident():
    return psutil.Process().memory_info().rss / MB
def register(memory):
    array = numpy.frombuffer(memory, dtype=numpy.uint8)
    assert int(torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.size, 0)) == 0
    return array
torch.zeros(1, device="cuda")

before = resident()
pinned = torch.empty(129 * MB, dtype=torch.uint8, pin_memory=True)
assert 256 <= resident() - before < 275, resident() - before

memory = mmap.mmap(-1, 64 * MB)
memory[5 * MB] = 7
before = resident()
array = register(memory)
assert 63 <= resident() - before < 80, resident() - before
assert array[5 * MB] == 7 and array.sum() == 7

with tempfile.TemporaryFile() as file:
    file.write(b"3" * MB)
    file.flush()
    array = register(mmap.mmap(file.fileno(), MB, prot=mmap.PROT_READ))
assert (array == ord("3")).all()
"""


@pytest.mark.emulates
@pytest.mark.parametrize("values", ["on", "off"])
def test_pinned_memory_is_resident_at_once(python, values):
    """Torch's allocator asks the driver for 256 MB to pin 129 MB.

    Registered memory keeps its contents, also if it is read-only.
    """
    pytest.importorskip("psutil")
    run = python("-c", PINNED, values, forked=True)
    assert run.returncode == 0, run.stderr
