"""``measure()`` says so if its result is not used in a ``with`` statement."""

import contextlib
import gc
import re
import weakref

import pytest

from pytest_cka_memory import MemoryProbe, RegionError
from pytest_cka_memory.testing import ScriptedMeter

NEVER_OPENED = (
    "cannot read retained_mb: cka_memory.measure('x') was called without 'with', so nothing was "
    "measured; write 'with cka_memory.measure('x') as region:', and read region.retained_mb after "
    "the block"
)


@pytest.fixture
def probe() -> MemoryProbe:
    """A probe whose figures are scripted."""
    return MemoryProbe(meter=ScriptedMeter())


def test_figure_of_a_region_that_was_never_opened_says_what_to_write(probe: MemoryProbe) -> None:
    """A figure of a region that was never opened raises an error that says what to write."""
    context = probe.measure("x")
    with pytest.raises(RegionError, match=re.escape(NEVER_OPENED)):
        context.retained_mb  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(
        RegionError,
        match=r"cannot read batches: cka_memory.measure\('x'\) was called without 'with'",
    ):
        context.batches([])  # type: ignore[attr-defined]
    (unused,) = probe.unused
    assert unused.mistake.startswith("cka_memory.measure('x') was called without 'with'")


def test_figure_of_the_context_after_its_block_names_the_region(probe: MemoryProbe) -> None:
    """After ``m = measure()`` and ``with m:``, a figure of m raises
    an error that names the region.
    """
    context = probe.measure()
    with context:
        pass
    with pytest.raises(
        RegionError, match=r"cannot read peak_bytes: cka_memory.measure\(\) is not the region"
    ):
        context.peak_bytes  # type: ignore[attr-defined]  # noqa: B018
    assert not probe.unused


def test_context_has_no_other_attributes(probe: MemoryProbe) -> None:
    """Other attributes of the context do not exist, as copying, pickling and mocks need it."""
    context = probe.measure()
    assert not hasattr(context, "__wrapped__")
    assert not hasattr(context, "retained_gb")


def test_context_works_once_in_every_way_to_enter_it(probe: MemoryProbe) -> None:
    """A context works once by ``with``, an exit stack or a decorator, which measures every call."""
    with contextlib.ExitStack() as stack:
        region = stack.enter_context(probe.measure("in a stack"))
    assert region.retained_bytes == 0

    @probe.measure("decorated")  # type: ignore[operator]
    def decorated() -> int:
        return 7

    assert decorated() + decorated() == 14
    assert [record.label for record in probe.records] == [
        "in a stack",
        "decorated",
        "decorated #2",
    ]
    assert not probe.unused


def test_context_is_refused_in_a_second_block(probe: MemoryProbe) -> None:
    """Each region has one set of figures, so that its context is refused in a second block."""
    with (again := probe.measure("again")):
        pass
    with (
        pytest.raises(RegionError, match="already used in a 'with' block; call"),
        again,
    ):
        raise AssertionError("the block must not begin")
    assert [record.label for record in probe.records] == ["again"]


def test_context_keeps_no_region_alive(probe: MemoryProbe) -> None:
    """A context does not keep its region alive, which knows its survivors."""
    with probe.measure() as region:
        pass
    known = weakref.ref(region)
    del region
    gc.collect()
    assert known() is None
