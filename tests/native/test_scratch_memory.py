"""The peak without what operators of torch allocate and free themselves."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.blocks.counter import Counter, knows_scratch

Peaks = tuple[int, int]


def peaks(action: Callable[[], object]) -> Peaks:
    """Return the peak increase with scratch memory and without it."""
    assert knows_scratch()
    region = MemoryProbe("cpu").run(action)
    assert region.increase_without_scratch_bytes is not None
    return region.peak_increase_bytes, region.increase_without_scratch_bytes


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Return a function that sets the number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attention() -> None:
    """Attention, of which each thread needs a buffer."""
    query = torch.ones(1, 1, 2048, 16)
    F.scaled_dot_product_attention(query, query, query)


def layer_norm() -> None:
    """A backward pass that sums up in a buffer of each thread."""
    nn.LayerNorm(100_000)(torch.ones(2, 100_000, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("program", [attention, layer_norm])
def test_peak_without_scratch_is_the_same_with_every_number_of_threads(threads, program):
    """The whole peak is not."""
    found = []
    for count in (1, 2, 4):
        threads(count)
        found.append(peaks(program))
    assert len({whole for whole, _ in found}) > 1
    assert len({without for _, without in found}) == 1


def test_tensors_of_python_code_are_no_scratch_memory():
    """What code allocates and frees between operators counts, whichever operator made it."""

    def code() -> None:
        one = torch.ones(1000)
        two = one + 1
        three = torch.empty(500).exp()
        del one, two, three

    assert peaks(code) == (12_000, 12_000)


def test_temporary_tensors_of_a_backward_pass_are_no_scratch_memory():
    """Gradients that the next node frees are allocated by one operator and freed after it."""
    values = torch.ones(10_000, requires_grad=True)
    graph = values.exp().exp().exp()

    def backward() -> None:
        graph.backward(torch.ones(10_000))

    whole, without = peaks(backward)
    assert without == whole
    assert whole >= 3 * 40_000


def test_what_an_operator_returns_counts_when_it_ends():
    """Its result is no scratch memory, and is part of a peak after which nothing is allocated."""
    kept = []
    _, without = peaks(lambda: kept.append(torch.ones(1000).sort()))
    assert without >= 4000 + 4000 + 8000


def test_custom_operator_keeps_the_tensors_of_its_code():
    """Its Python code calls operators, whose results are tensors of that code."""

    @torch.library.custom_op("cka_memory_tests::twice", mutates_args=())
    def twice(values: torch.Tensor) -> torch.Tensor:
        temporary = values * 2
        return temporary + 1

    values = torch.ones(1000)
    assert peaks(lambda: twice(values))[1] >= 8000


def test_buffers_of_compiled_code_are_no_scratch_memory():
    """A call of compiled code is marked as a range, which is not an operator."""

    def call() -> None:
        with torch._C._profiler._RecordFunctionFast("## Call CompiledFxGraph ##"):
            buffer = torch.empty(1000)
            result = buffer + 1
            del buffer, result

    assert peaks(call)[1] >= 8000


def test_nested_regions_have_their_own_peaks():
    """The inner region begins at the level then."""
    probe = MemoryProbe("cpu")
    with probe.measure("outer") as outer:
        first = torch.ones(1000)
        with probe.measure("inner") as inner:
            second = torch.ones(500)
            del second
        del first
    assert inner.increase_without_scratch_bytes == 2000
    assert outer.increase_without_scratch_bytes == 6000


def test_threads_do_not_mix_their_operators(threads):
    """Several threads run operators with scratch memory at the same time."""
    threads(1)
    alone = peaks(layer_norm)[1]

    def together() -> None:
        workers = [threading.Thread(target=layer_norm) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    whole, without = peaks(together)
    assert alone <= without <= 4 * alone
    assert without <= whole
    assert peaks(layer_norm)[1] == alone  # nothing has been left pending


def test_error_in_an_operator_leaves_nothing_pending():
    """An operator that fails has ended."""

    def fails() -> None:
        with pytest.raises(RuntimeError):
            torch.linalg.cholesky(-torch.eye(100))
        torch.ones(1000)

    assert peaks(fails)[1] >= 4000
    assert peaks(lambda: torch.ones(1000)) == (4000, 4000)


def test_operators_are_noted_only_while_a_region_is_open():
    """Outside of regions no operator takes longer, and a region can be opened again."""
    region = Counter().open()
    torch.ones(1000)
    first = region.peak_without_scratch()
    region.close()
    torch.ones(1000)
    again = Counter().open()
    assert again.peak_without_scratch() == again.start_level
    again.close()
    assert first is not None
