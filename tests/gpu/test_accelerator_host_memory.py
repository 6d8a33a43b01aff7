"""The second meter: what tensors on the host retain while an accelerator is measured."""

import gc
import sys

import numpy
import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.limits import max_retained_mb
from pytest_cka_memory.meters import cpu as cpu_module
from pytest_cka_memory.meters.accelerator import by_blocks
from pytest_cka_memory.meters.accelerator import by_blocks as native_module
from pytest_cka_memory.meters.blocks import NOT_LIVE
from pytest_cka_memory.meters.blocks.counter import Counter, counts_pinned
from pytest_cka_memory.reports import failure

pytestmark = pytest.mark.gpu
KEEP: list[object] = []


@pytest.fixture(autouse=True)
def _forget():
    yield
    KEEP.clear()


@pytest.fixture
def pinned(native):
    """Return a function that allocates so many bytes of pinned memory; skip if none is counted."""
    if not counts_pinned():
        pytest.skip("pinned memory is not counted with this build of torch")

    def pinned(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    return pinned


def test_tensors_on_the_host_count_beside_those_on_the_device(native, allocate):
    """Host memory counts torch's tensors and those on NumPy's memory, apart from the device's."""
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
    """Outputs that are moved to the CPU and collected in a list are named: a common leak."""
    with native.measure() as region:
        for _ in range(3):
            KEEP.append(allocate(512).cpu())
    (held,) = region.host_retained
    assert (region.retained_bytes, held.bytes, held.count) == (0, 1536, 3)
    assert held.code == "allocate(512).cpu()" or sys.version_info < (3, 11)


def test_tensors_that_are_moved_to_shared_memory_are_not_new(native):
    """A loader that starts workers moves its data set to shared memory; its tensors are not new."""
    older = torch.ones(64)
    with native.measure() as region:
        older.share_memory_()
        KEEP.append(torch.ones(1000).share_memory_())
    assert region.host_retained_bytes == 4000


def test_garbage_on_the_host_does_not_count(native):
    """Garbage on the host is collected at the end of a region, also
    if the device retained nothing.
    """
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
    """Each of two nested regions counts the host's new tensors from its own beginning."""
    with native.measure() as outer:
        KEEP.append(torch.ones(10))
        with native.measure() as inner:
            KEEP.append(torch.ones(100))
    assert (outer.host_retained_bytes, inner.host_retained_bytes) == (440, 400)


def test_limits_judge_the_device_and_their_message_shows_the_host(native, allocate):
    """Limits judge the device only; the message adds the host's
    tensors, which are in the record.
    """
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
    """If a memory profiler replaced the functions that count the
    host, only the device is measured.
    """
    with native.measure() as region:
        KEEP.append(torch.ones(1000))
        monkeypatch.setattr(by_blocks, "is_intact", lambda: False)
    assert (region.host_retained_bytes, region.retained_bytes) == (None, 0)
    assert region.host_retained == ()


def test_region_without_tensors_on_the_host_collects_no_garbage(native, allocate):
    """A full collection may take a second, so a region without tensors on the host makes none."""
    with native.measure():
        pass
    collections = gc.get_stats()[2]["collections"]
    with native.measure() as region:
        allocate(512)
        torch.ones(1000)
    assert region.host_retained_bytes == 0
    assert gc.get_stats()[2]["collections"] == collections


def test_pinned_memory_counts_with_the_bytes_that_were_asked_for(native, pinned):
    """Pinned memory counts with the requested bytes, although its allocator rounds them up."""
    with native.measure() as region:
        KEEP.append(pinned(700))
        KEEP.append(torch.ones(100).pin_memory())
        pinned(5000)
    assert region.host_retained_bytes == 1100
    assert [
        (held.bytes, held.pinned, held.held_by.rpartition(".")[2]) for held in region.host_retained
    ] == [
        (700, True, "KEEP[0]"),
        (400, True, "KEEP[1]"),
    ]
    (line, *_) = failure.holding_lines(region.host_retained[0])
    assert line == "  1 tensor, 700 bytes, uint8 (700,), pinned"


def test_copies_to_the_host_without_waiting_are_pinned_memory(native, allocate, pinned):
    """Torch copies to pinned memory if it does not wait; pinned and pageable tensors are listed
    apart.
    """
    with native.measure() as region:
        for non_blocking in (True, False):
            KEEP.append(allocate(512).to("cpu", non_blocking=non_blocking))
    assert region.host_retained_bytes == 1024
    assert {(held.bytes, held.pinned) for held in region.host_retained} == {
        (512, True),
        (512, False),
    }


def test_pinned_block_that_is_used_again_is_new(native, pinned):
    """A tensor is new even if it gets the pinned block of an older one, freed in the region."""
    old = [pinned(4096)]
    address = old[0].data_ptr()
    with native.measure() as region:
        old.clear()
        KEEP.append(pinned(4000))
    assert KEEP[0].data_ptr() == address
    assert region.host_retained_bytes == 4000


def test_pinned_block_that_is_used_many_times_counts_each_time(pinned):
    """A loop gets the same pinned block in each round, which counts from then until it is freed."""
    counter = Counter()
    level = counter.figures().level
    for _ in range(60):
        block = pinned(4000)
        assert counter.figures().level - level == 4000
        del block
        assert counter.figures().level == level


def test_every_pinned_block_that_is_freed_no_longer_counts(native, pinned):
    """A freed pinned block no longer counts, in whatever order blocks are freed."""
    level = Counter().figures().level
    tensors = [pinned(size) for size in range(1, 600)]
    assert Counter().figures().level - level == sum(range(1, 600))
    del tensors[::3]
    del tensors[::-2]
    tensors.clear()
    assert Counter().figures().level == level


def test_meter_for_the_cpu_counts_pinned_memory(pinned):
    """Pinned memory belongs to the host, so the meter for the CPU counts it too."""
    probe = MemoryProbe("cpu")
    with probe.measure() as region:
        KEEP.append(pinned(700))
        pinned(5000)
    assert (region.retained_bytes, region.peak_increase_bytes) == (700, 5700)
    assert "packed weights of quantised layers are not counted" in probe.meter.notes


def test_pinned_memory_from_before_counting_is_left_out_by_the_meter_for_the_cpu(pinned):
    """The meter for the CPU leaves out older pinned memory, because it would not see that it is
    freed.
    """
    old = pinned(700)
    Counter().remove(old.data_ptr())
    level = Counter().figures().level
    cpu_module.BlockMeter()
    assert Counter().serial_of(old.data_ptr()) == NOT_LIVE
    assert Counter().figures().level == level


def test_reports_say_if_pinned_memory_is_not_counted(native, monkeypatch):
    """If pinned memory cannot be counted, for example by an older library in C, a note says so."""
    meter = native.meter
    for module in (native_module, cpu_module):
        monkeypatch.setattr(module, "counts_pinned", lambda: False)
    notes = type(meter)(meter._device, meter._stats, meter._counter).notes
    assert "pinned memory of the host is not counted" in notes
    of_cpu = cpu_module.BlockMeter().notes
    assert "packed weights of quantised layers and pinned memory are not counted" in of_cpu
