"""Every planted leak is found to the byte, and its holder, its line and a remedy are named."""

from collections.abc import Iterator

import pytest
from leaks_in_graphs import GRAPHS
from leaks_in_objects import OBJECTS
from leaks_in_programs import PROGRAMS
from leaks_in_torch import TORCH
from planted import NO_HOLDER, Leak, cleaned_up, holder_text

from pytest_cka_memory import MemoryProbe

LEAKS = [*OBJECTS, *PROGRAMS, *TORCH, *GRAPHS]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_planted_leak_is_reported_with_its_bytes_holder_line_and_hint(leak: Leak) -> None:
    """Each planted leak is reported with the bytes, holder, line and
    hint of its row, and no other.
    """
    with MemoryProbe("cpu").measure() as region:
        leak.plant()
    assert region.retained_bytes == leak.bytes
    assert sum(holding.bytes for holding in region.retained) == leak.bytes
    holding = region.retained[0]
    assert leak.held_by in holder_text(holding)
    assert (holding.held_by is None) == (leak.held_by == NO_HOLDER)
    assert any(leak.is_made_by(frame) for frame in holding.created_at), holding.created_at
    if leak.hint is None:
        assert holding.hint is None or leak.held_by == NO_HOLDER
    else:
        assert leak.hint in (holding.hint or "")
