"""Fixtures that build records, samples and meters from plain figures."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import scripted_allocator
import torch

from pytest_cka_memory import MemoryProbe, RegionRecord, Sample
from pytest_cka_memory.meters import Meter, blocks
from pytest_cka_memory.meters.accelerator.by_storages import AcceleratorStorageMeter
from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter
from pytest_cka_memory.meters.cpu import BlockMeter
from pytest_cka_memory.meters.selection import accelerator_meter, cpu_meter
from pytest_cka_memory.meters.storage_meter import StorageMeter, StorageTracker
from pytest_cka_memory.testing import ScriptedMeter


@pytest.fixture(scope="module", autouse=True)
def _imports_excluded(imports_excluded_from_search: None) -> None:
    """Hide what was imported from collections and from the meter in every module of this folder."""


@pytest.fixture
def meter() -> ScriptedMeter:
    """A meter whose figures the test sets; like the CPU, it has no reserved memory."""
    return ScriptedMeter()


@pytest.fixture
def probe(meter: ScriptedMeter) -> MemoryProbe:
    return MemoryProbe(meter=meter)


@pytest.fixture(scope="module", params=["native", "ledger"])
def both_meters(request: pytest.FixtureRequest) -> Meter:
    """Each of the two meters for the CPU."""
    return StorageMeter() if request.param == "ledger" else request.getfixturevalue("native_meter")


@pytest.fixture(scope="module")
def native_meter() -> Meter:
    """The meter that counts blocks; what the ledger counts as a lower bound is tested with it."""
    if find_spec(f"{blocks.__name__}._counter") is None:  # one that is broken is a fault
        pytest.skip("the native counter was not compiled")
    chosen = cpu_meter()
    return chosen if isinstance(chosen, BlockMeter) else BlockMeter()


@pytest.fixture
def cpu(both_meters: Meter) -> MemoryProbe:
    """A probe for the CPU, with each meter."""
    return MemoryProbe(meter=both_meters)


@pytest.fixture
def is_native(both_meters: Meter) -> bool:
    """Whether the native counter measures, which counts what operators allocate inside."""
    return isinstance(both_meters, BlockMeter)


@pytest.fixture(scope="module")
def counting(both_meters: Meter) -> Iterator[Meter]:
    """Each meter, started once per file because starting the ledger searches all live objects."""
    both_meters.start()
    peaks = both_meters.open_peaks()
    yield both_meters
    if peaks is not None:
        peaks.close()
    both_meters.stop()


@pytest.fixture
def retained_by(counting: Meter) -> Callable[[Callable[[], object]], int]:
    """Return the bytes that stay allocated while the result of a function is referenced."""

    def measure(func: Callable[[], object]) -> int:
        mark = counting.mark()
        result = func()
        retained = counting.retained_since(mark)
        del result
        return retained

    return measure


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in a new process and return its exit status and output.

    Keyword arguments are added to the environment.
    """

    def run(
        *args: str | Path, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *args],
            cwd=cwd,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    """Build samples with the given allocated bytes; by default all batches have the same size."""

    def build(levels: Sequence[int], sizes: Sequence[int | None] | None = None) -> list[Sample]:
        sizes = sizes or [64] * len(levels)
        return [
            Sample(number, size, level, level, level)
            for number, (level, size) in enumerate(zip(levels, sizes, strict=True), start=1)
        ]

    return build


@pytest.fixture
def record(samples: Callable[..., list[Sample]]) -> Callable[..., RegionRecord]:
    """Build the record of a completed region; figures that are not given are 0."""

    def build(*, levels: Sequence[int] = (), **figures: object) -> RegionRecord:
        zeros = {"start_bytes": 0, "end_bytes": 0, "peak_bytes": 0, "retained_bytes": 0}
        given = {"label": "", "completed": True, **zeros, **figures}
        return RegionRecord(timeline=tuple(samples(levels)), **given)

    return build


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> scripted_allocator.Allocator:
    """Replace torch's functions for ``cuda`` by a scripted allocator."""
    return scripted_allocator.install(monkeypatch)


@pytest.fixture
def gpu(allocator: scripted_allocator.Allocator) -> AcceleratorMeter:
    """A meter with scripted counters that watches the tensors on the CPU."""
    meter = accelerator_meter("cuda", 1)
    assert isinstance(meter, AcceleratorStorageMeter)
    meter._tracker = StorageTracker(torch.device("cpu"))
    return meter
