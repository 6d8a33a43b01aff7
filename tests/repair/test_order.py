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
    **more: Any,
) -> Trial:
    """Return a trial with one change."""
    change = Change(name, name, trying=None, numbers=numbers, recomputes=recomputes)  # type: ignore[arg-type]
    return Trial((change,), Figures(peak, None), flops=flops, **more)


EXACT = trial("del logits", 75)
ROUNDED = trial("cross-entropy in parts", 70, numbers=LAST_DIGITS, recomputes=True)
HALF = trial("bfloat16 weights", 40, numbers="changes the numbers: bfloat16")
ON_HOST = trial("on the host", 60, host_bytes=1)
CHECKPOINT = trial("checkpoint", 50, flops=110, recomputes=True)
UNCOUNTED = trial("checkpoint all", 30, flops=None, recomputes=True)
CHEAP_CHECKPOINT = trial("checkpoint but products", 50, recomputes=True)
TOO_LARGE = trial("too large", 81)


@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
def test_what_computes_nothing_again_and_keeps_the_numbers_comes_first(order: int) -> None:
    """Of changes without counted operations or copies the exact ones are first, then what rounds
    differently, then what changes the numbers; the peak decides last.
    """
    wanted = [EXACT, CHEAP_CHECKPOINT, ROUNDED, HALF, ON_HOST, CHECKPOINT, UNCOUNTED]
    base = Trial((), Figures(100, None), flops=100)
    repairs = Repairs(base, [*wanted, TOO_LARGE][::order], budget_bytes=80)
    assert [each.name for each in repairs.fitting] == [each.name for each in wanted]
