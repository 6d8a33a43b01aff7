"""An exception at any line of opening or closing a region, with meters that use a dispatch mode.

Such an exception is raised by the handler of a signal, as pytest-timeout's or Ctrl-C's.
"""

import gc
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.measure.region_stack import region_stack_for
from pytest_cka_memory.meters import Meter, collector, torch_private
from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter
from pytest_cka_memory.meters.patching import Patch, SharedPatches
from pytest_cka_memory.meters.storage_meter import StorageMeter, StorageTracker

FUNCTIONS = (
    (torch.UntypedStorage, "resize_"),
    (torch.UntypedStorage, "from_file"),
    (sys, "unraisablehook"),
    (torch.accelerator, "reset_peak_memory_stats"),
    *((torch.jit, name) for name in torch_private.TRACERS),
)
"""What regions patch."""
CHANGING = re.compile(
    r"/(patching|collector|ledger|storage_meter|by_storages|region_stack|_python_dispatch)\.py$"
)
"""The files whose lines can leave something behind."""
Line = tuple[str, int]
"""File and number."""


def patched() -> list[Any]:
    """Return the functions that regions patch, as they are now."""
    return [*(vars(owner).get(name) for owner, name in FUNCTIONS), *gc.callbacks]


def trackers_of(meter: Any) -> list[StorageTracker]:
    return [meter._tracker]


def left_behind(meter: Meter, before: list[Any]) -> list[str]:
    """Return what an interrupted region has left, although another region came after it."""
    stack = region_stack_for(meter)
    locks = [stack._lock]
    for tracker in trackers_of(meter):
        locks += [tracker._lock, tracker.ledger._lock]
    found = {
        "a dispatch mode": torch._C._len_torch_dispatch_stack(),
        "the collector is off": not gc.isenabled(),
        "a patch": patched() != before,
        "an open region": stack._open,
        "a user": any(tracker._users for tracker in trackers_of(meter)),
        "a lock": any(lock._is_owned() for lock in locks),  # type: ignore[attr-defined]
        "torch functions are off": not torch._C._is_torch_function_enabled(),
    }
    return [what for what, is_left in found.items() if is_left]


@pytest.fixture(params=["ledger", "accelerator"])
def patching_meter(request: pytest.FixtureRequest) -> Meter:
    """A meter for the CPU, and one for an accelerator, that record storages in a ledger."""
    if request.param == "ledger":
        return StorageMeter()
    meter: AcceleratorMeter = request.getfixturevalue("gpu")
    return meter


@pytest.fixture
def few_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the modules of torch from the garbage collector, and from the ledger that it does."""
    with MemoryProbe(meter=StorageMeter()).measure():
        torch.zeros(1)  # imports modules
    gc.collect()
    gc.freeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("few_objects")
def test_an_exception_at_any_line_leaves_nothing_after_the_next_region(
    patching_meter: Meter, interrupted: Callable[..., bool]
) -> None:
    """Any line of a region's start may be interrupted: after the next one nothing is left.

    Each line is interrupted the first and the last time that it runs.
    """

    def run() -> None:
        with MemoryProbe(meter=patching_meter).measure():
            torch.zeros(3)

    def next_figures() -> tuple[int, int, int]:
        with MemoryProbe(meter=patching_meter).measure() as region:
            kept = torch.zeros(5), torch.zeros(100).sum()
        assert len(kept) == 2
        return region.retained_bytes, region.net_bytes, region.peak_increase_bytes

    run()
    expected, before = next_figures(), patched()
    often: Counter[Line] = Counter()

    def note(frame: FrameType) -> bool:
        often[frame.f_code.co_filename, frame.f_lineno] += 1
        return False

    def at(line: Line, time: int) -> Callable[[FrameType], bool]:
        times = count(1)

        def is_there(frame: FrameType) -> bool:
            is_line = frame.f_lineno == line[1] and frame.f_code.co_filename == line[0]
            return is_line and next(times) == time

        return is_there

    assert not interrupted(run, note, CHANGING)
    wrong = {}
    for line, times in often.items():
        for time in {1, times}:
            interrupted(run, at(line, time), CHANGING)
            figures, left = next_figures(), left_behind(patching_meter, before)
            if left or figures != expected:
                wrong[line] = left, figures
    assert wrong == {}
    assert len(often) > 100


@pytest.mark.slow
def test_the_collector_is_enabled_again_by_the_next_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If an exception leaves the garbage collector disabled, the next region enables it."""
    monkeypatch.setattr(collector, "_off_in", threading.get_ident())
    gc.disable()
    try:
        with MemoryProbe(meter=StorageMeter()).measure():
            assert gc.isenabled()
    finally:
        gc.enable()


def test_patches_that_hide_each_other_are_undone_when_their_users_are_gone() -> None:
    """Of two patches of one function, for the device and for the host, both are undone."""

    class Target:
        def method(self) -> None: ...

    class Patching(SharedPatches):
        def make_patches(self) -> Iterator[Patch]:
            yield self.patch(Target, "method", lambda original: lambda self: original(self))

    class User: ...

    original, first, second = Target.method, Patching(), Patching()
    interrupted_user, next_user = User(), User()
    first.start(interrupted_user)
    second.start(interrupted_user)
    del interrupted_user
    first.start(next_user)
    second.start(next_user)
    second.stop(next_user)
    first.stop(next_user)
    assert Target.method is original
