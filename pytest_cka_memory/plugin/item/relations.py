"""Compare a test with another set of its parameters: ``memory_baseline(relative_to="eager")``."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.markers import RELATIONS
from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.plugin.pytest_private import parameter_ids
from pytest_cka_memory.plugin.session.meter import known_meter

if TYPE_CHECKING:
    from pytest_cka_memory.core.figures import RegionRecord
    from pytest_cka_memory.core.relations import ComparedRegion
    from pytest_cka_memory.core.tolerance import Tolerance
    from pytest_cka_memory.core.verdicts import Limit

_compared_key = pytest.StashKey[dict[str, "dict[str, ComparedRegion]"]]()
"""Test -> label -> region, of the tests with which others are compared."""
_additions_key = pytest.StashKey[dict[str, set[str]]]()
"""Test -> what must be measured in addition, because others are compared with it."""


_Siblings = dict[tuple[str, ...], pytest.Item]
_functions_key = pytest.StashKey[tuple[int, dict[tuple[int, str], _Siblings]]]()
"""The number of tests, and the tests of each function of a module or class."""


def limits_of(
    item: pytest.Item, arguments: Mapping[str, Any], text: str, tolerance: "Tolerance"
) -> "list[Limit]":
    """Return the limits on a test that is compared with others; none for such another test itself.

    Args:
        item: the test.
        arguments: those of its marker. A name in them is the id of a parameter: the other test has
            it, and the same other parameters.
        text: the marker as the user writes it.
        tolerance: how far a figure may rise above that of the other test.

    Raises:
        LimitError: if there is no such test, or an argument is wrong.
    """
    from pytest_cka_memory.core.relations import RelationLimit, relations_of

    given = {name: value for name, value in arguments.items() if name in RELATIONS}
    limits: list[Limit] = []
    meter = known_meter(item.config)
    facts = {} if meter is None else meter.facts()
    for relation in relations_of(**given, tolerance=tolerance):
        other = _other_of(item, relation.other)
        if other is None:
            argument = next(name for name, value in given.items() if relation.other in str(value))
            raise LimitError(
                f"{argument}={given[argument]!r}: no test of this function with the parameter "
                f"{relation.other!r}, and otherwise the same parameters, was collected; write the "
                "id of a parameter, and select both tests"
            )
        known = item.config.stash.setdefault(_compared_key, {}).setdefault(other.nodeid, {})
        limit = RelationLimit(text, relation, other.nodeid, partial(_find, known), facts)
        additions = item.config.stash.setdefault(_additions_key, {})
        additions.setdefault(other.nodeid, set()).update({limit.addition} - {""})
        if other is not item:
            limits.append(limit)
    return limits


def _find(known: "Mapping[str, ComparedRegion]", label: str) -> "ComparedRegion | None":
    return known.get(label)


def additions_for_others(item: pytest.Item) -> set[str]:
    """Return what is measured of a test in addition, because others are compared with it."""
    return item.config.stash.get(_additions_key, {}).get(item.nodeid, set())


def note(item: pytest.Item, records: "Iterable[RegionRecord]", facts: Mapping[str, Any]) -> None:
    """Keep the figures of a test if others are compared with it."""
    known = item.config.stash.get(_compared_key, {}).get(item.nodeid)
    if known is not None:
        from pytest_cka_memory.core.relations import ComparedRegion

        known.update({it.label: ComparedRegion(it, facts) for it in records if it.completed})


def pending(limits: "Iterable[Limit]", records: "Sequence[RegionRecord]") -> list[dict[str, Any]]:
    """Return the relations that can only be judged when other tests have run."""
    found = []
    for limit in limits:
        if hasattr(limit, "pending"):
            found += [it for record in records if (it := limit.pending(record)) is not None]
    return found


def _other_of(item: pytest.Item, name: str) -> pytest.Item | None:
    """Return the test with one parameter replaced by `name`; the test itself if it has that one."""
    ids = tuple(parameter_ids(item))
    if name in ids:
        return item
    siblings = _siblings_of(item)
    replaced = ((*ids[:at], name, *ids[at + 1 :]) for at in range(len(ids)))
    return next((siblings[found] for found in replaced if found in siblings), None)


def _siblings_of(item: pytest.Item) -> "_Siblings":
    """Return the tests of the same function by their parameters."""
    count, functions = item.session.stash.get(_functions_key, (0, {}))
    if count != len(item.session.items):  # others were selected since
        functions = {}
        for other in item.session.items:
            function = (id(other.parent), getattr(other, "originalname", ""))
            functions.setdefault(function, {})[tuple(parameter_ids(other))] = other
        item.session.stash[_functions_key] = len(item.session.items), functions
    return functions.get((id(item.parent), getattr(item, "originalname", item.name)), {})
