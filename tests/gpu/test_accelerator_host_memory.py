"""The second meter: what tensors on the host retain while an accelerator is measured."""

import gc

import numpy
import pytest
import torch

from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.limits import max_retained_mb
from pytest_cka_memory.meters.accelerator import host_memory
from pytest_cka_memory.reports import failure

pytestmark = pytest.mark.gpu
KEEP: list[object] = []


@pytest.fixture(autouse=True)
def _forget():
    yield
    KEEP.clear()


def test_tensors_on_the_host_count_beside_those_on_the_device(native, allocate):
    """Torch's own and those on NumPy's memory; the device's figures do not contain them."""
    older = torch.ones(64)
    with native.measure() as region:
        KEEP.append(allocate(512))
        KEEP.append(torch.ones(1000))
        KEEP.append(torch.from_numpy(numpy.zeros(500)))
        KEEP.append(older.view(8, 8))
        torch.ones(5000)
    assert region.retained_bytes == 512
    assert (region.host_retained_bytes, region.host_retained_mb) == (8000, 8000 / 2**20)
    assert [(held.bytes, held.held_by.rpartition(".")[2]) for held in region.host_retained] == [
        (4000, "KEEP[1]"),
        (4000, "KEEP[2]"),
    ]


def test_copies_to_the_host_that_are_kept_are_named(native, allocate):
    """The usual leak: outputs of a model, moved to the CPU and collected in a list."""
    with native.measure() as region:
        for _ in range(3):
            KEEP.append(allocate(512).cpu())
    (held,) = region.host_retained
    assert (region.retained_bytes, held.bytes, held.count) == (0, 1536, 3)
    assert held.code == "allocate(512).cpu()"


def test_garbage_on_the_host_does_not_count(native):
    """It is collected at the end of a region, also if the device has retained nothing."""
    gc.disable()
    try:
        with native.measure() as region:
            cycle: list[object] = [torch.ones(1000)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.enable()
    assert region.host_retained_bytes == 0


def test_inner_region_does_not_count_what_the_outer_has_allocated(native):
    """Each counts from its own beginning."""
    with native.measure() as outer:
        KEEP.append(torch.ones(10))
        with native.measure() as inner:
            KEEP.append(torch.ones(100))
    assert (outer.host_retained_bytes, inner.host_retained_bytes) == (440, 400)


def test_limits_judge_the_device_and_their_message_shows_the_host(native, allocate):
    """The record has what the message needs, as in another process."""
    limit = max_retained_mb("1 KiB")
    with native.measure() as region:
        KEEP.append(torch.ones(1000))
    assert judge("t", region.record, [limit]).breaches == ()
    with native.measure() as region:
        KEEP.append(torch.ones(1000))
        KEEP.append(allocate(2048))
    assert region.host_retained
    result = judge("t", region.record, [limit])
    text = failure.render([result], native.meter.facts()).splitlines()
    shown = text.index("  also retained on the host: 4,000 bytes, not judged")
    assert text[shown + 1] == "  1 tensor, 4,000 bytes, float32 (1000,)"
    assert "KEEP[1]" in " ".join(text[shown + 2 :])


def test_host_that_is_no_longer_counted_is_unknown(native, monkeypatch):
    """A memory profiler may replace the functions that count it; the device is still measured."""
    with native.measure() as region:
        KEEP.append(torch.ones(1000))
        monkeypatch.setattr(host_memory, "is_intact", lambda: False)
    assert (region.host_retained_bytes, region.retained_bytes) == (None, 0)
    assert region.host_retained == ()


def test_region_without_tensors_on_the_host_collects_no_garbage(native, allocate):
    """A full collection may take a second."""
    with native.measure():
        pass
    collections = gc.get_stats()[2]["collections"]
    with native.measure() as region:
        allocate(512)
        torch.ones(1000)
    assert region.host_retained_bytes == 0
    assert gc.get_stats()[2]["collections"] == collections
