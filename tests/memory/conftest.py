"""Plain figures to build tests from; the device is asked only where a test says so."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from pytest_cka_memory import MemoryProbe, RegionRecord, Sample
from pytest_cka_memory.meters import Meter, meter_for
from pytest_cka_memory.testing import ScriptedMeter


@pytest.fixture
def meter() -> ScriptedMeter:
    """Memory moved by hand, without a reserve, as on the CPU."""
    return ScriptedMeter()


@pytest.fixture
def probe(meter: ScriptedMeter) -> MemoryProbe:
    return MemoryProbe(meter=meter)


@pytest.fixture(scope="module")
def counting() -> Iterator[Meter]:
    """The CPU meter, counting for a whole file: a walk over all objects costs once, not twice a
    test.
    """
    meter = meter_for("cpu")
    meter.start()
    yield meter
    meter.stop()


@pytest.fixture
def born(counting: Meter) -> Callable[[Callable[[], object]], int]:
    """Bytes that a function's result keeps alive, as the operators alone tell it."""

    def born_in(func: Callable[[], object]) -> int:
        mark = counting.mark()
        result = func()
        retained = counting.retained_since(mark)
        del result
        return retained

    return born_in


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    """Samples with the given live levels, and batches all of one size unless told."""

    def build(levels: Sequence[int], sizes: Sequence[int | None] | None = None) -> list[Sample]:
        sizes = sizes or [64] * len(levels)
        return [
            Sample(number, size, level, level, level)
            for number, (level, size) in enumerate(zip(levels, sizes, strict=True), start=1)
        ]

    return build


@pytest.fixture
def record(samples: Callable[..., list[Sample]]) -> Callable[..., RegionRecord]:
    """A completed record, all zeros but for what the test names."""

    def build(*, levels: Sequence[int] = (), **figures: object) -> RegionRecord:
        zeros = {"start_bytes": 0, "end_bytes": 0, "peak_bytes": 0, "retained_bytes": 0}
        given = {"label": "", "completed": True, **zeros, **figures}
        return RegionRecord(timeline=tuple(samples(levels)), **given)

    return build
