"""Every planted leak is found to the byte; its holder, its line and what to do are named."""

from collections.abc import Iterator

import pytest
from leaks_in_objects import OBJECTS
from leaks_in_programs import PROGRAMS
from leaks_in_torch import TORCH
from planted import NOBODY, Leak, cleaned_up, told

from pytest_cka_memory import MemoryProbe

LEAKS = [*OBJECTS, *PROGRAMS, *TORCH]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_leak_is_found_to_the_byte_and_named(leak: Leak) -> None:
    """Bytes, path, creating line and advice are those of the table, and nothing else is found."""
    with MemoryProbe("cpu").measure() as region:
        leak.plant()
    assert region.retained_bytes == leak.bytes
    assert sum(holding.bytes for holding in region.retained) == leak.bytes
    holding = region.retained[0]
    assert leak.held_by in told(holding)
    assert (holding.held_by is None) == (leak.held_by == NOBODY)
    assert any(leak.is_made_by(frame) for frame in holding.created_at), holding.created_at
    if leak.hint is None:
        assert holding.hint is None or leak.held_by == NOBODY
    else:
        assert leak.hint in (holding.hint or "")
