"""Which of the changes that fit a budget is recommended."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pytest_cka_memory.repair.report import Repairs, as_text, best
from pytest_cka_memory.repair.trials import LAST_DIGITS, Change, Figures, Trial
from pytest_cka_memory.units import MB


def trial(
    name: str,
    peak: int,
    *,
    flops: int | None = 100,
    numbers: str = "",
    recomputes: bool = False,
    rounds_updates: bool = False,
    **more: Any,
) -> Trial:
    """Return a trial with one change."""
    change = Change(
        name,
        name,
        trying=None,  # type: ignore[arg-type]
        numbers=numbers,
        recomputes=recomputes,
        rounds_updates=rounds_updates,
    )
    return Trial((change,), Figures(peak, None), flops=flops, **more)


FEW_COPIES = trial("few on the host", 60, host_bytes=1)
EXACT = trial("del logits", 75)
ROUNDED = trial("cross-entropy in parts", 70, numbers=LAST_DIGITS, recomputes=True)
AUTOCAST = trial("bfloat16 autocast", 40, numbers="changes the results: bfloat16")
WEIGHTS = trial(
    "bfloat16 weights", 39, numbers="changes the results: bfloat16", rounds_updates=True
)
ON_HOST = trial("on the host", 60, host_bytes=1)
CHECKPOINT = trial("checkpoint", 50, flops=110, recomputes=True)
UNCOUNTED = trial("checkpoint all", 30, flops=None, recomputes=True)
CHEAP_CHECKPOINT = trial("checkpoint but products", 50, recomputes=True)
TOO_LARGE = trial("too large", 81)


def test_table_fits_eighty_columns_with_figures_before_names():
    """The names of combinations are long, and a figure beyond the edge of a page is not read."""
    gigabytes = 31_432 * MB
    as_it_is = Trial((), Figures(gigabytes, gigabytes + MB), flops=10**12)
    names = ["save activations on the host", "cross-entropy in 8 parts", "bfloat16 weights"]
    many = tuple(Change(name, name, trying=None) for name in names)  # type: ignore[arg-type]
    rounded = replace(many[1], numbers=LAST_DIGITS)
    less = Figures(12_870 * MB, 13_000 * MB)
    trials = [
        Trial((many[0], rounded, many[2]), less, flops=2 * 10**12, host_bytes=20_000 * MB),
        Trial(many[:1], Figures(20_000 * MB, 13_000 * MB), flops=10**12),
    ]
    repairs = Repairs(as_it_is, trials, is_complete=True)
    text = as_text(repairs, device="emulate:cuda:h100", label="train.py")
    table = text.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert table == [
        "   peak    saved  reserved   FLOPs  to host  change",
        "31432.0            31433.0                   as it is",
        "20000.0  11432.0   13000.0    +0 %           save activations on the host",
        "12870.0  18562.0   13000.0  +100 %  20000.0  save activations on the host +",
        "                                             cross-entropy in 8 parts +",
        "                                             bfloat16 weights [last digits",
        "                                             differ]",
        "Sizes are in MB (2**20 bytes) unless a unit is given",
        "In brackets: what differs in the results; without brackets, they are the same",
    ]
    assert max(map(len, table)) <= 80


@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
def test_what_computes_nothing_again_and_keeps_the_numbers_comes_first(order: int) -> None:
    """Of changes without counted operations or copies the exact ones are first, then what rounds
    differently, then what changes the results, and last what rounds each update of the weights;
    the peak decides after that. A byte on the host costs as much as many operations, and what was
    not counted as much as the whole step.
    """
    wanted = [EXACT, CHEAP_CHECKPOINT, ROUNDED, AUTOCAST, WEIGHTS, CHECKPOINT, UNCOUNTED, ON_HOST]
    base = Trial((), Figures(100, None), flops=100)
    repairs = Repairs(base, [*wanted, TOO_LARGE][::order], budget_bytes=80)
    assert [each.name for each in repairs.fitting] == [each.name for each in wanted]


@pytest.mark.parametrize(
    ("flops", "cheapest"), [(1_000_000, "few on the host"), (110, "checkpoint")]
)
def test_copies_to_the_host_cost_time(flops: int, cheapest: str) -> None:
    """To copy a byte and back takes as long as 19,500 operations: what takes less is cheaper."""
    again = trial("checkpoint", 50, flops=100 + flops, recomputes=True)
    repairs = Repairs(Trial((), Figures(100, None), flops=100), [FEW_COPIES, again])
    assert repairs.added_flops(FEW_COPIES) == 19_500
    assert min(repairs.trials, key=repairs.cost).name == cheapest


def test_what_fits_without_copies_is_beside_what_copies() -> None:
    """A cheap change that copies little is the first; then comes one that copies nothing."""
    again = trial("checkpoint", 50, flops=10**6, recomputes=True)
    base = Trial((), Figures(100, None), flops=100)
    repairs = Repairs(base, [FEW_COPIES, again, TOO_LARGE], budget_bytes=80)
    assert [each.name for each in best(repairs)] == ["few on the host", "checkpoint"]


def test_what_fits_has_a_row_and_no_part_that_hardly_matters(
    table_of: Callable[[str], dict[str, str]],
) -> None:
    """A part that lowers nothing but a few copies is left out."""
    host, block = trial("on the host", 60, host_bytes=10), trial("checkpoint", 90, recomputes=True)
    both = Trial((*host.changes, *block.changes), Figures(60, None), host_bytes=9, flops=100)
    repairs = Repairs(
        Trial((), Figures(100, None), flops=100), [host, block, both], budget_bytes=80
    )
    assert [each.name for each in repairs.fitting] == ["on the host"]
    both = replace(both, host_bytes=1)
    repairs.trials[-1] = both
    assert [each.name for each in repairs.fitting] == [both.name, "on the host"]
    assert both.name in table_of(as_text(repairs, device="cpu"))


@pytest.mark.parametrize(("weights", "lowest"), [(39.9, AUTOCAST), (39, WEIGHTS)])
def test_what_saves_hardly_more_is_not_worth_other_numbers(weights: float, lowest: Trial) -> None:
    """Below half a percent the cheaper change is the lowest, otherwise the lower peak."""
    scaled = [
        trial("bfloat16 autocast", 40_000, numbers="changes the results: bfloat16"),
        trial(
            "bfloat16 weights",
            int(weights * 1000),
            numbers="changes the results: bfloat16",
            rounds_updates=True,
        ),
    ]
    base = Trial((), Figures(100_000, None), flops=100)
    found = Repairs(base, scaled).lowest
    assert found is not None
    assert found.name == lowest.name
