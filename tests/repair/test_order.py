"""Which of the changes that fit a budget is recommended."""

from typing import Any

import pytest

from pytest_cka_memory.repair.search import Repairs
from pytest_cka_memory.repair.trials import LAST_DIGITS, Change, Figures, Trial


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


@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
def test_what_computes_nothing_again_and_keeps_the_numbers_comes_first(order: int) -> None:
    """Of changes without counted operations or copies the exact ones are first, then what rounds
    differently, then what changes the results, and last what rounds each update of the weights;
    the peak decides after that.
    """
    wanted = [EXACT, CHEAP_CHECKPOINT, ROUNDED, AUTOCAST, WEIGHTS, ON_HOST, CHECKPOINT, UNCOUNTED]
    base = Trial((), Figures(100, None), flops=100)
    repairs = Repairs(base, [*wanted, TOO_LARGE][::order], budget_bytes=80)
    assert [each.name for each in repairs.fitting] == [each.name for each in wanted]


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
