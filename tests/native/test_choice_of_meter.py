"""The ledger measures the CPU where the allocator is not counted, and its notes say why."""

import pytest

NOTES = """
from pytest_cka_memory import MemoryProbe
import torch
probe = MemoryProbe("cpu")
print(type(probe.meter).__name__)
print([note for note in probe.meter.notes if "is not counted" in note])
with probe.measure() as region:
    kept = torch.zeros(10)
assert region.retained_bytes == 40
"""
NOT_COMPILED = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.endswith("_counter") else find(name)
"""
OTHER_FUNCTIONS = """
import ctypes
class Other(ctypes.PyDLL):
    def __getattr__(self, name):
        if name == "counter_open":
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.PyDLL = Other
"""
NEWER_LIBRARY = """
import ctypes
class Other(ctypes.PyDLL):
    def __init__(self, path):
        raise OSError(f"/lib/libc.so.6: version `GLIBC_9' not found (required by {path})")
ctypes.PyDLL = Other
"""
NOT_LOADED = """
import ctypes
class Other(ctypes.PyDLL):
    def __init__(self, path):
        raise OSError(f"{path}: undefined symbol: PyObject_NewInAnotherVersion")
ctypes.PyDLL = Other
"""
UNKNOWN_PYTHON = """
from pytest_cka_memory.meters import blocks
blocks._FUNCTIONS["stacks_prepare"] = (lambda done: 0, [])
"""
NOT_COUNTED = """
from pytest_cka_memory.meters.blocks.counter import Counter
Counter.counts = lambda *_: False
"""


def test_the_allocator_is_counted_if_the_library_was_compiled(run_code) -> None:
    """If the library was compiled, the allocator is counted and no note is printed."""
    assert run_code(NOTES, forked=True, CKA_MEMORY_NATIVE="1").splitlines() == ["BlockMeter", "[]"]


@pytest.mark.parametrize(
    ("before", "native", "reason"),
    [
        pytest.param("", "0", "CKA_MEMORY_NATIVE is 0", id="turned-off"),
        pytest.param(
            NOT_COMPILED, "1", "the native counter was not compiled for this system", id="missing"
        ),
        pytest.param(
            OTHER_FUNCTIONS,
            "1",
            "the native counter is of another version; reinstall pytest-cka-memory",
            id="of-another-version",
        ),
        pytest.param(
            NOT_LOADED,
            "1",
            "the native counter cannot be loaded (undefined symbol: PyObject_NewInAnotherVersion); "
            "reinstall pytest-cka-memory",
            id="not-loaded",
        ),
        pytest.param(
            NEWER_LIBRARY,
            "1",
            "the native counter cannot be loaded (/lib/libc.so.6: version `GLIBC_9' not found "
            "(required by the counter)); reinstall pytest-cka-memory",
            id="newer-library",
        ),
        pytest.param(
            UNKNOWN_PYTHON,
            "1",
            "the native counter does not find the functions of this Python",
            id="unknown-python",
        ),
        pytest.param(
            NOT_COUNTED,
            "1",
            "this build of torch allocates memory in a way that is not known",
            id="other-allocator",
        ),
    ],
)
def test_the_ledger_takes_over_and_one_note_says_why(
    run_code, before: str, native: str, reason: str
) -> None:
    """If the library cannot be used, storages are counted correctly, and one note says why."""
    printed = run_code(before + NOTES, forked=True, CKA_MEMORY_NATIVE=native)
    meter, notes = printed.splitlines()
    assert meter == "StorageMeter"
    assert notes == str([f"torch's allocator is not counted: {reason}"])


@pytest.mark.emulates
def test_note_of_an_accelerator_says_why_its_blocks_are_not_counted(run_code) -> None:
    """What the list of a peak leaves out is said with its reason."""
    printed = run_code(
        "from pytest_cka_memory import MemoryProbe\n"
        "print(*MemoryProbe('emulate:cuda,values=off').meter.notes, sep='\\n')",
        forked=True,
        CKA_MEMORY_NATIVE="0",
    )
    assert (
        "the list of what was live at the peak leaves out memory inside operators, because "
        "CKA_MEMORY_NATIVE is 0"
    ) in printed.splitlines()
