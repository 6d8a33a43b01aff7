"""A walk over Python's objects meets the same in C as in Python."""

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import refusing_objects

from pytest_cka_memory.holders.search import LEAVES, PythonWalk, Walk, new_walk
from pytest_cka_memory.meters.blocks import SWITCH
from pytest_cka_memory.meters.blocks.python_objects import CompiledWalk


def compiled() -> Walk:
    """Return a walk in C."""
    found = CompiledWalk.begin([*LEAVES])
    assert found is not None
    return found


KINDS = [pytest.param(compiled, marks=pytest.mark.native), PythonWalk]


@pytest.fixture(params=KINDS)
def walk(request: pytest.FixtureRequest) -> Walk:
    """Return a new walk of each kind, for which lists, dicts and tuples are plain."""
    make: Callable[[], Walk] = request.param
    made = make()
    for kind in (list, dict, tuple):
        made.add_plain(kind)
    return made


class Other:
    """An object of a type that no test calls plain."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Alone:
    """The same, without functions: these would lead a walk to this module, and so to all."""


def everything_from(walk: Walk, start: list[Any]) -> list[list[Any]]:
    """Return the objects that were met at each distance from those of `start`."""
    walk.enter(start)
    levels, first = [walk[0 : len(walk)]], 0
    while levels[-1]:
        end = len(walk)
        walk.follow(first, end)
        levels.append(walk[end : len(walk)])
        first = end
    return levels[:-1]


def test_objects_are_met_once_in_the_order_of_references(walk: Walk) -> None:
    """Each object is met once, at its shortest distance, in the order of the references."""
    shared: list[Any] = []
    left, right = [shared], [shared, [shared]]
    top = [left, right]
    second = everything_from(walk, [top])[1]
    assert [*map(id, second)] == [*map(id, gc.get_referents(top))]
    assert len(walk) == 5
    assert shared in walk
    assert [] not in walk


def test_only_new_objects_of_types_that_are_not_plain_are_returned(walk: Walk) -> None:
    """What may have rules is returned when it is met first, and not again."""
    first, second = Other([1]), Other([2])
    assert walk.enter([[first, second], first, first]) == [first]
    assert walk.follow(0, 1) == [second]
    walk.add_plain(Other)
    assert walk.enter([first, Other(3)]) == []
    assert len(walk) == 4


def test_numbers_and_texts_are_not_met(walk: Walk) -> None:
    """Objects that reference nothing of interest are not met, wherever they are."""
    everything_from(walk, [[1, "text", 2.5, None, b"", True, range(3)], 4])
    assert len(walk) == 1


def test_objects_in_a_container_that_is_not_tracked_are_met(walk: Walk) -> None:
    """The collector leaves out a tuple of objects that reference nothing; those may have rules."""
    value = object()
    values = (value,)
    gc.collect()  # which is when it finds that out
    assert not gc.is_tracked(values)
    everything_from(walk, [values])
    assert value in walk


def test_parents_are_the_first_that_reference_an_object(walk: Walk) -> None:
    """The first of several referrers is returned; objects that none references are left out."""
    wanted, unreferenced = [0], [1]
    first, second = [wanted], [wanted]
    everything_from(walk, [first, second])
    found = walk.parents(0, len(walk), [wanted, unreferenced])
    assert [(id(child), id(parent)) for child, parent in found] == [(id(wanted), id(first))]
    ((_, parent),) = walk.parents(1, 2, [wanted])
    assert parent is second
    assert list(walk.parents(2, 3, [wanted])) == []


def test_tracked_objects_that_were_not_met_are_unmet(walk: Walk) -> None:
    """What a walk has not met is found among all objects of the collector."""
    met, unmet = [Alone()], [Alone(), 1]
    everything_from(walk, [met])
    found = {*map(id, walk.unmet())}
    assert {id(unmet), id(unmet[0])} <= found
    assert not {id(met), id(met[0])} & found


def test_neither_the_walk_nor_what_it_returns_is_unmet(walk: Walk) -> None:
    """They reference what was met, and what is unmet, but only for the search."""
    met, unmet = [Alone()], [Alone()]
    everything_from(walk, [met])
    found = walk.unmet()
    assert not {id(walk), id(found)} & {*map(id, found)}
    referents = [(it, gc.get_referents(it)) for it in found]
    assert not any(each is met[0] for _, every in referents for each in every)
    assert [it for it, every in referents if any(each is unmet[0] for each in every)] == [unmet]


def test_referents_that_a_walk_has_met_are_left_out(walk: Walk) -> None:
    """Of what an object references, the objects are returned that a walk has not met."""
    met, unmet = [1], [Other(2)]
    walk.enter([met])
    assert walk.unmet_referents([met, unmet, 3, "text"]) == [unmet]
    assert walk.unmet_referents(3) == []


def test_unmet_objects_that_lead_to_others_are_returned(walk: Walk) -> None:
    """A list is returned if it leads to an object that may have rules, directly or not."""
    chain = [[[Other(1)]]]
    assert walk.unmet_referents([chain]) == [chain]
    assert walk.unmet_referents(chain[0]) == [chain[0][0]]


@pytest.mark.parametrize("make", KINDS)
def test_objects_are_kept_alive_as_long_as_the_walk(make: Callable[[], Walk]) -> None:
    """What was met is referenced once more until the walk is freed, and so is what leads to it."""
    value = Other(1)
    values, before = [value], sys.getrefcount(value)
    walk = make()
    walk.enter(values)
    walk.follow(0, len(walk))
    assert sys.getrefcount(value) == before + 1
    del walk
    assert sys.getrefcount(value) == before


@pytest.mark.parametrize("make", KINDS)
def test_what_only_a_walk_keeps_alive_is_freed_with_it(make: Callable[[], Walk]) -> None:
    """An object whose last reference ends during a walk is freed when the walk ends."""
    value = Other(1)
    reference = weakref.ref(value)
    walk = make()
    walk.enter([value])
    del value
    assert reference() in walk
    del walk
    assert reference() is None


def test_search_for_unmet_objects_keeps_none_alive(walk: Walk) -> None:
    """All objects of the collector are looked at, and none is referenced afterwards."""
    value = Other(1)
    reference = weakref.ref(value)
    assert id(value) in map(id, walk.unmet())
    del value
    assert reference() is None


@pytest.mark.parametrize("make", KINDS)
def test_types_of_objects_that_were_met_can_be_freed(make: Callable[[], Walk]) -> None:
    """A class of the user that nobody references any more is freed, though its objects were met."""
    kind = type("Kind", (Other,), {})
    reference = weakref.ref(kind)
    walk = make()
    walk.enter([kind([])])
    walk.follow(0, len(walk))
    walk.unmet_referents([kind([])])
    del kind, walk
    gc.collect()
    assert reference() is None


@pytest.mark.native
def test_the_switch_chooses_a_walk_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk is compiled unless the switch turns compiled code off."""
    assert type(new_walk()) is CompiledWalk
    monkeypatch.setenv(SWITCH, "0")
    assert type(new_walk()) is PythonWalk


def test_no_attribute_of_an_object_is_read(walk: Walk) -> None:
    """Objects are met whose class raises at every access, of its objects and of itself."""
    value = refusing_objects.of_refusing_type(Other(1))
    assert [*map(id, walk.enter([value]))] == [id(value)]
    walk.add_plain(type(value))
    assert walk.enter([value]) == []
    assert value in walk
    assert Other in map(type, walk.unmet_referents(value))
