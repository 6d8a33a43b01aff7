"""A state that each batch computes from its last value is named, with its line and what to do."""

import inspect
from collections.abc import Collection, Mapping
from types import CodeType
from typing import Any

import pytest
from rebuilt_states import STATES, State

from pytest_cka_memory import MemoryProbe, RegionRecord


class ExplainsGrowth:
    """Asks for what grows."""

    draws_paths = False

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        return ("growth_bytes_per_batch",)

    def named_values(self) -> Mapping[str, Any]:
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.loop.__name__)
def test_a_state_that_is_computed_from_itself_is_named_with_its_line(state: State) -> None:
    """The variable is named, with the code that makes its new value, and advice that fits."""
    with MemoryProbe("cpu", explainer=ExplainsGrowth()).measure() as region:
        state.loop(region.batch_done)
    largest = region.record.grown[0]
    assert str(largest.held_by).startswith(state.variable)
    assert state.advice in str(largest.hint)
    if hasattr(CodeType, "co_positions"):  # Python 3.10 has the whole line, shortened in the middle
        assert state.made in f"{largest.code} {largest.hint}".replace('"', "'")
    lines, first = inspect.getsourcelines(state.loop)
    place = largest.created_at[0].partition(" in ")[0]
    assert first < int(place.rpartition(":")[2]) < first + len(lines)
