"""Fixtures that build records, samples and meters from plain figures."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pytest_cka_memory import MemoryProbe, RegionRecord, Sample
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.meters.selection import meter_for
from pytest_cka_memory.testing import ScriptedMeter


@pytest.fixture
def meter() -> ScriptedMeter:
    """A meter whose figures the test sets; like the CPU, it has no reserved memory."""
    return ScriptedMeter()


@pytest.fixture
def probe(meter: ScriptedMeter) -> MemoryProbe:
    return MemoryProbe(meter=meter)


@pytest.fixture(scope="module")
def counting() -> Iterator[Meter]:
    """The CPU meter, started once per file because starting it searches all live objects."""
    meter = meter_for("cpu")
    meter.start()
    yield meter
    meter.stop()


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
