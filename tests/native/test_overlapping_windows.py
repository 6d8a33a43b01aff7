"""Tensors on overlapping parts of memory that other libraries lend: each byte counts once."""

import gc
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.blocks.counter import Counter

LENDERS: dict[str, Callable[[Any, int, int], torch.Tensor]] = {
    "from_numpy": lambda lent, start, end: torch.from_numpy(lent[start:end]),
    "from_dlpack": lambda lent, start, end: torch.from_dlpack(lent[start:end]),
    "frombuffer": lambda lent, start, end: torch.frombuffer(
        lent, dtype=torch.uint8, offset=start, count=end - start
    ),
    "as_tensor": lambda lent, start, end: torch.as_tensor(lent[start:end]),
    "asarray": lambda lent, start, end: torch.asarray(lent[start:end]),
}


class Oracle:
    """Says for each byte of an array how many windows cover it, and since which of them."""

    def __init__(self, size: int, *, is_torchs: bool) -> None:
        self.covering = np.zeros(size, int)
        self.since = np.zeros(size, int)
        self.is_torchs = is_torchs
        """Whether the memory is a tensor's own, so that it counts nothing."""

    def add(self, start: int, end: int, number: int) -> None:
        self.since[start:end][self.covering[start:end] == 0] = number
        self.covering[start:end] += 1

    def remove(self, start: int, end: int) -> None:
        self.covering[start:end] -= 1

    def bytes_since(self, number: int) -> int:
        """Return the bytes that are covered since window `number`, or a later one."""
        if self.is_torchs:
            return 0
        return int(((self.covering > 0) & (self.since >= number)).sum())


class Schedule:
    """Windows over four arrays, which are lent and freed in a random order."""

    def __init__(self, seed: int, file: Path) -> None:
        self._random = np.random.default_rng(seed)
        sizes = [int(size) for size in self._random.integers(1, 5000, 4)]
        file.write_bytes(bytes(sizes[2]))
        with file.open("r+b") as opened:
            mapped = mmap.mmap(opened.fileno(), 0)
        self._owner = torch.zeros(sizes[3], dtype=torch.uint8)
        self._arrays = [
            np.zeros(sizes[0], np.uint8),
            np.frombuffer(bytearray(sizes[1]), np.uint8),
            np.frombuffer(mapped, np.uint8),
            self._owner.numpy(),
        ]
        self._oracles = [Oracle(size, is_torchs=i == 3) for i, size in enumerate(sizes)]
        self._live: list[tuple[torch.Tensor, int, int, int]] = []
        self.count = 0

    def step(self) -> None:
        """Lend a window or free one."""
        if self._live and self._random.random() < 0.45:
            tensor, which, start, end = self._live.pop(self._random.integers(len(self._live)))
            del tensor
            self._oracles[which].remove(start, end)
            return
        which = int(self._random.integers(len(self._arrays)))
        array = self._arrays[which]
        start, end = sorted(self._random.choice(len(array) + 1, 2, replace=False).tolist())
        lender = self._random.choice(list(LENDERS))
        self.count += 1
        self._live.append((LENDERS[lender](array, start, end), which, start, end))
        self._oracles[which].add(start, end, self.count)

    def bytes_since(self, number: int = 0) -> int:
        return sum(oracle.bytes_since(number) for oracle in self._oracles)

    def end(self) -> None:
        """Free all windows."""
        self._live.clear()


@pytest.mark.parametrize("seed", range(200))
def test_random_windows_count_as_numpy_says(
    probe: MemoryProbe, counter: Counter, tmp_path: Path, seed: int
) -> None:
    """Windows of five lenders over one memory, lent and freed in any order, count each byte once:
    at each moment, in the peak, and in what a region retains besides what was lent before it.
    """
    schedule = Schedule(seed, tmp_path / "file")
    with probe.measure() as early:
        level = counter.figures().level
        for _ in range(40):
            schedule.step()
            assert counter.figures().level - level == schedule.bytes_since()
    assert early.retained_bytes == early.net_bytes == schedule.bytes_since()
    lent_before, first = schedule.bytes_since(), schedule.count + 1
    with probe.measure() as region:
        levels = [lent_before]
        for _ in range(40):
            schedule.step()
            levels.append(schedule.bytes_since())
            assert counter.figures().level - level == levels[-1]
    assert region.net_bytes == levels[-1] - lent_before
    assert region.retained_bytes == schedule.bytes_since(first)
    assert region.peak_increase_bytes == max(levels) - lent_before
    schedule.end()
    assert counter.figures().level == level


def test_windows_are_described_with_what_holds_them(probe: MemoryProbe) -> None:
    """What a window covers besides others is found as held by it, wherever the window begins."""
    lent = np.zeros(1000, np.uint8)
    with probe.measure() as region:
        first = torch.from_numpy(lent[:900])
        second = torch.from_numpy(lent[500:])
    found = {str(holding.held_by).split()[0]: holding.bytes for holding in region.retained}
    assert found == {"first": 900, "second": 100}
    del first, second


def test_one_reference_is_not_said_to_free_what_others_use(probe: MemoryProbe) -> None:
    """If two tensors use the same lent memory, no message says that deleting one frees it."""
    lent = np.zeros(1000, np.uint8)
    with probe.measure() as region:
        one = torch.from_numpy(lent)
        other = torch.from_numpy(lent[10:20])
    (holding,) = region.retained
    assert (holding.bytes, holding.freed_bytes) == (1000, None)
    del one, other
    with probe.measure() as region:
        one = torch.from_numpy(lent)
    (holding,) = region.retained
    assert (holding.bytes, holding.freed_bytes) == (1000, 1000)
    del one


def test_parts_of_older_tensors_count_nothing(probe: MemoryProbe) -> None:
    """Parts of the memory of tensors that were created and freed in between count nothing."""
    for size in (100, 10_000):
        tensors = [torch.zeros(size) for _ in range(100)]
        del tensors[::2]
        gc.collect()
        with probe.measure() as region:
            parts = [torch.from_numpy(tensor.numpy()[size // 2 :]) for tensor in tensors]
        assert region.retained_bytes == region.net_bytes == 0
        del parts, tensors


BEFORE_THE_FIRST_REGION = """
import numpy as np
import torch
from pytest_cka_memory import MemoryProbe

array = np.zeros(1000, np.uint8)
owner = torch.zeros(100)
lent = [torch.from_numpy(array[:900]), torch.from_numpy(array[100:])]
part = torch.from_numpy(owner.numpy()[50:])
probe = MemoryProbe("cpu")
with probe.measure() as region:
    del lent[0]
print(region.start_bytes, region.net_bytes)
del lent[0], part
with probe.measure() as region:
    pass
print(region.start_bytes)
"""


AFTER_MANY_OTHERS = """
import numpy as np
import torch
from pytest_cka_memory import MemoryProbe

owner = torch.zeros(100)
probe = MemoryProbe("cpu")
with probe.measure() as region:
    for _ in range(3):
        others = [torch.zeros(1) for _ in range(10_000)]
        torch.from_numpy(np.zeros(1, np.uint8))
        del others
    part = torch.from_numpy(owner.numpy()[50:])
print(region.retained_bytes, region.net_bytes)
"""


def test_parts_of_the_oldest_tensors_count_nothing_after_many_others(
    run_code: Callable[..., str],
) -> None:
    """A tensor older than the first region is known as torch's after many others were freed."""
    assert run_code(AFTER_MANY_OTHERS, forked=True).split() == ["0", "0"]


def test_memory_lent_before_the_first_region_is_noticed_when_it_is_freed(
    run_code: Callable[..., str],
) -> None:
    """What was lent before the first region counts each byte once, until it is freed."""
    assert run_code(BEFORE_THE_FIRST_REGION, forked=True).split() == ["1400", "-100", "400"]


def test_split_windows_are_recorded_as_parts(probe: MemoryProbe, counter: Counter) -> None:
    """If a window is freed of which others use parts, the record of the region has these parts as
    allocated with the window and as live, and the rest as freed.
    """
    lent = np.zeros(1000, np.uint8)
    with probe.measure():
        region = counter.open()
        assert region.record()
        whole = torch.from_numpy(lent)
        parts = [torch.from_numpy(lent[100:200]), torch.from_numpy(lent[500:1000])]
        del whole
        recording = region.recorded()
        assert recording is not None
        found = {(block.bytes, block.begin, block.end) for block in recording.blocks}
        region.close()
    assert found == {(100, 1, 2), (100, 1, 0), (300, 1, 3), (500, 1, 0)}
    del parts
