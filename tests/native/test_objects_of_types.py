"""The search for objects of some types among all that the garbage collector knows."""

import gc
import weakref
from typing import Any

from pytest_cka_memory.meters.blocks import objects_of_types

KINDS = [type(f"Kind{number}", (), {}) for number in range(600)]
"""More than twice as many as there are groups by which C tells most types apart."""


def test_objects_of_the_given_types_are_found_and_no_others() -> None:
    """Of many types, the objects of those are found that are asked for, each once."""
    values: list[Any] = [kind() for kind in KINDS]
    found = objects_of_types(set(KINDS[::2]))
    assert sorted(map(id, found)) == sorted(map(id, values[::2]))


def test_objects_of_subclasses_are_left_out() -> None:
    """A subclass is a type of its own, which must be asked for."""
    derived = type("Derived", (KINDS[0],), {})
    value = derived()
    assert objects_of_types({KINDS[0]}) == []
    assert objects_of_types({KINDS[0], derived}) == [value]


def test_search_keeps_nothing_alive() -> None:
    """Neither the objects that were looked at nor those that were found are kept by the search."""
    found, other = KINDS[0](), KINDS[1]()
    references = [weakref.ref(found), weakref.ref(other)]
    assert objects_of_types({KINDS[0]}) == [found]
    del found, other
    gc.collect()
    assert [reference() for reference in references] == [None, None]
