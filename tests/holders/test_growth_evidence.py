"""What explains a growth: most bytes first, and how much of the growth that is."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pytest
import torch

from pytest_cka_memory import MemoryProbe, Region, RegionRecord
from pytest_cka_memory.core import sentences
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.holders.growing import growing_holdings
from pytest_cka_memory.limits import flat_per_batch

pytestmark = pytest.mark.native
MB = 2**20


class Judged:
    """Asks for what explains the growth if it breaks the limit, as a test does."""

    draws_paths = False

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        return [breach.figure for breach in judge("t", record, [flat_per_batch()]).breaches]

    def named_values(self) -> Mapping[str, Any]:
        return {}


def measured(train: Any, *args: Any) -> Region:
    """Return the region of a loop whose variables are gone at its end."""
    with MemoryProbe("cpu", explainer=Judged()).measure("train") as region:
        train(region, *args)
    return region


def periodic(region: Region, every: int, batches: int, small: bool) -> None:
    """Keep 1 MB at every so many batches, and a number at each."""
    losses, kept = [], {}
    for number, batch in enumerate(region.batches([torch.ones(8)] * batches)):
        if small:
            losses.append(batch.mean())
        if number % every == every - 1:
            kept[number] = torch.ones(MB // 4)


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True], ids=["alone", "beside-losses"])
@pytest.mark.parametrize(("every", "batches"), [(1, 10), (3, 20), (4, 24), (7, 60), (10, 200)])
def test_what_each_kth_batch_keeps_is_named_beside_a_number_per_batch(
    every: int, batches: int, small: bool
) -> None:
    """The larger part is named first, also if it is found later than the smaller one."""
    region = measured(periodic, every, batches, small)
    first, *rest = region.record.grown
    assert str(first.held_by).startswith("kept[")
    assert [str(it.held_by)[:7] for it in rest] == ["losses["] * small
    growth = region.growth_bytes_per_batch
    assert first.bytes_per_batch is not None
    assert 0.8 * growth < first.bytes_per_batch < 1.4 * growth
    said = sentences.sentence(region.record, "growth_bytes_per_batch")
    assert said.startswith("explains ")
    assert said.endswith(" per batch")


def listed(region: Region) -> None:
    """Keep each loss in a list; the last is the value of a variable, too."""
    losses = []
    for batch in region.batches([torch.ones(8)] * 10):
        loss = batch.mean()
        losses.append(loss)


@pytest.mark.slow
def test_the_last_of_a_list_counts_although_a_variable_has_it() -> None:
    """What is found at a variable was made at the same line as the rest of the list."""
    with MemoryProbe("cpu", explainer=Judged()).measure() as region:
        listed(region)
    said = sentences.sentence(region.record, "growth_bytes_per_batch")
    assert said == "explains 4 of 4 B per batch"


def filled_cache(region: Region) -> None:
    """Fill a cache in the first batches, and keep a number in each."""
    cache, losses = {}, []
    for number, batch in enumerate(region.batches([torch.ones(8)] * 60)):
        if number < 8:
            cache[number] = torch.ones(MB // 4)
        losses.append(batch.mean())


@pytest.mark.slow
def test_a_cache_that_is_full_explains_no_growth() -> None:
    """What grew only before the batches that are judged is not named."""
    (found,) = measured(filled_cache).record.grown
    assert str(found.held_by).startswith("losses[")
    assert found.bytes_per_batch == 4


def hook_loops(region: Region) -> None:
    """Let a hook of each result reference the result, so that C++ keeps both."""
    layer = torch.nn.Linear(64, 64)
    for batch in region.batches([torch.ones(1024, 64)] * 10):
        result = layer(batch)
        result.register_hook(lambda grad, result=result: grad)
        result.sum().backward()
        layer.zero_grad()


@pytest.mark.slow
def test_loops_without_a_name_are_one_group() -> None:
    """Loops that each batch makes differ in the numbers of their hooks only."""
    first, *_ = measured(hook_loops).record.grown
    assert first.bytes_per_batch == 4 * 1024 * 64
    assert "handle.remove()" in str(first.hint)
    assert "the loop" in str(first.held_by)


def nothing_kept(region: Region) -> None:
    """Grow by a buffer that NumPy does not lend: as C++ code that keeps more in each batch."""
    state = torch.zeros(0)
    for _ in region.batches([torch.ones(8)] * 12):
        state = torch.cat([state, torch.zeros(1000)])


@pytest.mark.slow
def test_a_replaced_tensor_says_so_and_how_much_it_explains() -> None:
    """A tensor that is rebuilt larger explains the whole growth."""
    (found,) = measured(nothing_kept).record.grown
    assert found.bytes_per_batch == 4000
    assert "each batch replaces `state` by a larger one" in str(found.hint)


def linked_list(region: Region) -> None:
    """Keep each tensor together with those before it."""
    state: Any = None
    for number in region.batches(range(12)):
        state = torch.zeros(100 * number + 100), state


def linked_list_of_other_classes(region: Region) -> None:
    """Reference each tensor in another way, so that no two are in one group."""
    state: Any = None
    for number in region.batches(range(8)):
        state = type(f"Node{number}", (), {f"x{number}": torch.zeros(1000), f"n{number}": state})


def full_cache_and_last(region: Region) -> None:
    """Fill a cache, then keep the last tensor of the same line and one number in each batch."""
    cache, losses, last = [], [], []
    for number in region.batches(range(12)):
        made = torch.zeros(100 * number + 100)
        (cache if number < 3 else last).append(made)
        del last[:-1], made
        losses.append(torch.zeros(50))


@pytest.mark.parametrize(
    "loop",
    [linked_list, linked_list_of_other_classes, full_cache_and_last],
    ids=lambda it: it.__name__,
)
def test_what_replaces_nothing_is_not_to_be_limited(loop: Callable[[Region], None]) -> None:
    """A line of code may take more memory than after two batches, although it has freed nothing."""
    grown = measured(loop).record.grown
    assert grown
    assert not any("replaces" in str(found.hint) for found in grown)


def record(**more: Any) -> RegionRecord:
    """Return a region's record with a peak of 100 bytes."""
    figures = {"start_bytes": 0, "end_bytes": 0, "peak_bytes": 100, "retained_bytes": 0}
    return RegionRecord(**{"label": "", "completed": True, **figures, **more})


def shares_of() -> Iterator[tuple[RegionRecord, str, str]]:
    """Yield a record, a figure, and what is said about it."""
    held, unknown = Holding(bytes=75, count=1, held_by="net.x"), Holding(bytes=25, count=1)
    leak = record(retained_bytes=100, retained=(held, unknown))
    rest = "no Python object was found that references the rest"
    yield leak, "retained_bytes", f"explains 75 of 100 B; {rest}"
    whole = record(retained_bytes=75, retained=(held,))
    yield whole, "retained_bytes", "explains 75 of 75 B"
    yield record(), "retained_bytes", ""
    made = Holding(bytes=60, count=1, created_at=("net.py:3 in f",))
    peak = record(at_peak=(made, Holding(bytes=40, count=1)))
    said = "explains 60 of 100 B; it is not known where the rest was allocated"
    yield peak, "peak_bytes", said
    early = Holding(bytes=40, count=1, before_region=True)
    yield record(at_peak=(made, early)), "peak_bytes", "explains 100 of 100 B"
    yield record(at_peak=(made, early)), "peak_increase_bytes", "explains 100 of 100 B"
    reserve = {"reserved_start_bytes": 0, "reserved_peak_bytes": 200}
    said = (
        "no tensor used the rest at the peak: the allocator keeps it reserved for later allocations"
    )
    found = record(at_peak=(made, early), **reserve)
    yield found, "reserved_increase_bytes", f"explains 60 of 200 B; {said}"
    yield record(at_peak=(made,)), "no_such_figure", ""


@pytest.mark.parametrize(("found", "figure", "said"), [*shares_of()])
def test_share_of_what_is_explained(found: RegionRecord, figure: str, said: str) -> None:
    """The sentence says how many bytes are explained, and why the rest is not."""
    assert sentences.sentence(found, figure) == said


def of_loss(bytes: int, count: int, batches: int, per_batch: float, held_by: str) -> Holding:
    """Return a group of tensors of one line, which calls a loss."""
    return Holding(
        bytes=bytes,
        count=count,
        held_by=held_by,
        created_at=("net.py:5 in loss",),
        code="loss(output, target)",
        batches=batches,
        bytes_per_batch=per_batch,
    )


def test_large_tensors_of_a_line_are_not_taken_for_small_ones_of_it() -> None:
    """A loss keeps 4 bytes in each batch; what its last graph has saved is no more of these.

    It counted as theirs, so that they came first.
    """
    logged, last = of_loss(16, 4, 4, 4.0, "log[0]"), of_loss(4, 1, 1, 4.0, "loss")
    saved = of_loss(3 * MB, 3, 4, MB, "log[0].grad_fn._saved_self")
    last_saved = of_loss(MB, 1, 1, MB, "loss.grad_fn._saved_self")
    found = growing_holdings([logged, last_saved, last], [], 3)
    assert [(it.held_by, it.bytes_per_batch) for it in found] == [("log[0]", 8.0)]
    found = growing_holdings([saved, last_saved, logged, last], [], 3)
    assert [(it.held_by, it.bytes_per_batch) for it in found] == [
        ("log[0].grad_fn._saved_self", 2.0 * MB),
        ("log[0]", 8.0),
    ]
