"""``MemoryProbe.largest``: the largest size that fits, with a scripted device and on the CPU."""

import pytest
import torch

from pytest_cka_memory import LimitError, MemoryProbe, RegionError, SizeError
from pytest_cka_memory.testing import ScriptedMeter
from pytest_cka_memory.units import MB


class Card(ScriptedMeter):
    """A scripted accelerator of 100 bytes, whose allocator raises as torch's does."""

    device = "cuda:0"
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 B")

    def allocate(self, size_bytes: int) -> int:
        if self.read().allocated_bytes + size_bytes > 100:
            raise self.full
        return super().allocate(size_bytes)


@pytest.fixture
def card() -> Card:
    return Card(has_reserve=True)


@pytest.fixture
def tried() -> list[int]:
    """The sizes that a step was called with."""
    return []


@pytest.fixture
def step(card: Card, tried: list[int]):
    """A step that needs 7 bytes for each item, and frees them."""

    def step(size: int) -> None:
        tried.append(size)
        card.free(card.allocate(7 * size))

    return step


def test_largest_size_fits_and_one_more_does_not(card, step, tried):
    """14 items of 7 bytes fit into 100 bytes, 15 do not; both are tried again at the end."""
    assert MemoryProbe(meter=card).largest(step) == 14
    assert tried == [1, 2, 4, 8, 16, 12, 14, 15, 14, 15]


@pytest.mark.parametrize("size", range(1, 15))
def test_every_number_is_found(card, size):
    """The search ends at each possible result, also at powers of two and beside them."""
    bytes_each = 100 // size
    found = MemoryProbe(meter=card).largest(lambda n: card.free(card.allocate(bytes_each * n)))
    assert found == 100 // bytes_each


@pytest.mark.parametrize("at_most", [1, 2, 3, 13, 14])
def test_nothing_above_at_most_is_tried(card, step, tried, at_most):
    """If every size fits, the result is `at_most`, and no larger size is tried."""
    assert MemoryProbe(meter=card).largest(step, at_most) == max(tried) == at_most


def test_at_most_may_be_too_large_by_one(card, step, tried):
    """`at_most` itself is tried, so a result just below it is known to be the largest."""
    assert MemoryProbe(meter=card).largest(step, at_most=15) == 14
    assert max(tried) == 15


def test_zero_if_not_even_one_fits(card, tried):
    """If ``step(1)`` runs out of memory, the result is 0, and only 1 is tried."""

    def step(size: int) -> None:
        tried.append(size)
        card.allocate(101)

    assert MemoryProbe(meter=card).largest(step) == 0
    assert set(tried) == {1}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("HIP out of memory."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_errors_of_the_driver_and_of_libraries_mean_that_a_size_does_not_fit(card, step, error):
    """A driver, cuBLAS or cuDNN without memory raises an error of its own, which counts as well."""
    card.full = error
    assert MemoryProbe(meter=card).largest(step) == 14


@pytest.mark.parametrize("error", [ValueError("size"), RuntimeError("shapes"), MemoryError()])
def test_error_of_another_kind_is_raised(card, step, tried, error):
    """An error that does not come from the device's memory ends the search."""

    def fails(size: int) -> None:
        if size == 4:
            raise error
        step(size)

    with pytest.raises(type(error)) as raised:
        MemoryProbe(meter=card).largest(fails)
    assert raised.value is error
    assert tried == [1, 2]


def test_limit_is_judged_by_the_rise_of_the_peak_to_the_byte(meter):
    """On a CPU the peak above the level at the start of each call decides, as in max_peak_mb."""
    meter.allocate(1000)
    probe = MemoryProbe(meter=meter)

    def step(size: int) -> None:
        meter.free(meter.allocate(10 * size))

    assert probe.largest(step, limit_mb="70 B") == 7
    assert probe.largest(step, limit_mb="69 B") == 6
    assert probe.records == []


def test_limit_holds_beside_the_memory_of_the_card(card, step):
    """With a limit on an accelerator, a size fits if it breaks neither."""
    assert MemoryProbe(meter=card).largest(step, limit_mb="30 B") == 4
    assert MemoryProbe(meter=card).largest(step, limit_mb=1) == 14


def test_state_of_the_first_call_may_stay(card):
    """What the first call keeps, as an optimizer its state, counts for every size."""
    state = []

    def step(size: int) -> None:
        state[:] = state or [card.allocate(30)]
        card.free(card.allocate(7 * size))

    assert MemoryProbe(meter=card).largest(step) == 10


def test_step_that_keeps_more_with_each_call_is_refused(card):
    """A leak makes the result depend on the number of calls; the error has its bytes."""

    def step(size: int) -> None:
        card.free(card.allocate(7 * size))
        card.allocate(8)

    message = (
        r"size 9 had fitted but ran out of memory when .* 9 calls, which left 32 B more in use"
    )
    with pytest.raises(RegionError, match=message):
        MemoryProbe(meter=card).largest(step)


def test_size_that_fits_at_the_second_time_is_refused(card, step):
    """Memory that another program returns during the search makes the result wrong."""
    other = [card.allocate(50)]
    calls = iter(range(100))

    def changes(size: int) -> None:
        if next(calls) == 6:
            card.free(other.pop())
        step(size)

    with pytest.raises(RegionError, match="size 8 ran out of memory, and fitted when it was tried"):
        MemoryProbe(meter=card).largest(changes)


@pytest.mark.parametrize("at_most", [0, -1, 1.5, True, "8"])
def test_at_most_must_be_a_whole_number(card, step, at_most):
    """A bound that is not a whole number from 1 on is refused before the first call."""
    with pytest.raises(ValueError, match="at_most must be a whole number of at least 1, not"):
        MemoryProbe(meter=card).largest(step, at_most)


def test_cpu_needs_a_limit(meter):
    """On a CPU nothing says how much memory a test may use, so a limit is required."""
    with pytest.raises(LimitError, match=r"needs a limit on the CPU.*limit_mb=1024"):
        MemoryProbe(meter=meter).largest(pytest.fail)
    with pytest.raises(SizeError, match="'much'"):
        MemoryProbe(meter=meter).largest(pytest.fail, limit_mb="much")


def test_largest_batch_of_a_network_on_the_cpu(cpu):
    """Each item has 1 MB as input and 1 MB as output of relu: 20 MB have space for 10 items."""
    returned = cpu.largest(lambda n: torch.ones(n * MB // 4).relu(), limit_mb=20)
    assert returned == 10


def test_result_and_garbage_of_a_call_do_not_count_for_the_next(cpu):
    """What a call returned and what it left in reference cycles is freed before the next call."""

    class Node:
        pass

    def step(size: int) -> torch.Tensor:
        node = Node()
        node.itself, node.values = node, torch.ones(size * MB // 4)
        return node.values

    assert cpu.largest(step, limit_mb=9) == 9


def test_size_beyond_the_memory_of_the_machine_does_not_fit(cpu):
    """An allocation that the system refuses to a CPU is out of memory too."""
    assert cpu.largest(lambda n: torch.empty(n * 2**60, dtype=torch.uint8), limit_mb=1) == 0
