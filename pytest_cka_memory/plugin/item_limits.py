"""Every limit on one test: of its markers, of other plugins, of options and of the baseline.

Imported with the first test that may have limits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.markers import MARKERS, NO_ALLOCATIONS, RELATIONS
from pytest_cka_memory.core.verdicts import Limit
from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.limits import (
    FlatPerBatch,
    call_text,
    default_limits,
    limit_from_marker,
    only_warns,
    with_argument,
)
from pytest_cka_memory.plugin.device import known_meter
from pytest_cka_memory.plugin.pytest_private import parameter_ids, parameters
from pytest_cka_memory.plugin.settings import Settings, settings_key
from pytest_cka_memory.stored import MARKER as BASELINE_MARKER

if TYPE_CHECKING:
    from pytest_cka_memory.core.relations import ComparedRegion
    from pytest_cka_memory.core.verdicts import Tolerance
    from pytest_cka_memory.meters.base import Meter
    from pytest_cka_memory.plugin.pytest_private import Node


@dataclass(frozen=True)
class ItemLimits:
    """The limits of one test by where they come from; one limit may be in several fields."""

    all: tuple[Limit, ...]
    """Every limit that its regions are judged by."""
    own: tuple[Limit, ...]
    """Those of its markers and of other plugins."""
    of_markers: tuple[Limit, ...]
    """Those of its markers, without those of the next field."""
    scoped: tuple[Limit, ...]
    """Those of markers that are judged over all tests of its class or module."""


@dataclass(frozen=True)
class ComparedTest:
    """What is kept of a test because others are compared with it."""

    regions: "dict[str, ComparedRegion]" = field(default_factory=dict)
    """Label -> region; the test fills it when it has run."""
    additions: set[str] = field(default_factory=set)
    """What must be measured in addition, because limits of the others are on it."""


@dataclass(frozen=True)
class _MarkedTest:
    """What the limits of a test depend on, taken from pytest's item at once."""

    nodeid: str
    marks: "Mapping[str, Sequence[tuple[Node, pytest.Mark]]]"
    """Name of a marker -> the markers with the nodes that have them, the nearest first."""
    is_in_class: bool
    ids: tuple[str, ...]
    """Those of its parameters."""
    parameters: Mapping[str, Any]
    of_plugins: Sequence[Limit]
    """The limits that other plugins set for it."""
    siblings: "Callable[[], _Siblings]"
    """Returns the tests of the same function; called only if one is compared with others."""
    settings: Settings
    meter: "Meter | None"
    compared: dict[str, ComparedTest]
    """By its name, each test of the session with which others are compared."""


def limits_of(
    item: pytest.Item, of_plugins: Sequence[Limit], compared: dict[str, ComparedTest]
) -> ItemLimits:
    """Return every limit on a test that is measured.

    Args:
        item: the test.
        of_plugins: the limits that other plugins set for it.
        compared: by its name, each test with which others are compared; those with which `item` is
            compared are added.

    Raises:
        LimitError: if a marker cannot be used.
        BaselineError: if the baseline file cannot be used.
    """
    marks: dict[str, list[tuple[Node, pytest.Mark]]] = {}
    for node, mark in item.iter_markers_with_node():
        marks.setdefault(mark.name, []).append((node, mark))
    test = _MarkedTest(
        item.nodeid,
        marks,
        item.getparent(pytest.Class) is not None,
        parameter_ids(item),
        parameters(item),
        of_plugins,
        partial(_siblings_of, item),
        item.config.stash[settings_key],
        known_meter(item.config),
        compared,
    )
    return _limits_on(test)


def _limits_on(test: _MarkedTest) -> ItemLimits:
    marks, settings = test.marks, test.settings
    if NO_ALLOCATIONS in marks:
        mark = _closest(marks[NO_ALLOCATIONS])
        if mark.args or mark.kwargs:
            text = call_text(NO_ALLOCATIONS, mark.args, mark.kwargs)
            raise LimitError(
                f"{text}: this marker takes no arguments; write @pytest.mark.{NO_ALLOCATIONS}"
            )
    marked: list[Limit] = [
        limit_from_marker(mark.name, mark.args, mark.kwargs)
        for name in MARKERS
        for mark in _closest_of_each(marks.get(name, ()))
        if name != BASELINE_MARKER
    ]
    if BASELINE_MARKER in marks:
        marked += _limits_of_baseline_marker(test, _closest(marks[BASELINE_MARKER]))
    marked = [_with_sizes(test, limit) for limit in marked]
    growing = frozenset(limit.of for limit in marked if isinstance(limit, FlatPerBatch))
    marked = [
        replace(limit, others=growing) if isinstance(limit, FlatPerBatch) else limit
        for limit in marked
    ]
    scoped = [limit for limit in marked if limit.scope != "function"]
    for limit in scoped:
        if limit.scope == "class" and not test.is_in_class:
            raise LimitError(f"{limit.text}: the test is not in a class; write scope='module'")
    of_markers = [limit for limit in marked if limit.scope == "function"]
    own = [*of_markers, *test.of_plugins]
    every = own + default_limits(own, settings.max_retained_bytes, settings.max_peak_bytes)
    if settings.baseline.named and BASELINE_MARKER not in marks:
        every += _committed(test, "--cka-memory-baseline", settings.baseline.tolerance)

    def warned(limits: Sequence[Limit]) -> tuple[Limit, ...]:
        if not settings.only_warns:
            return tuple(limits)
        return tuple(replace(limit, warns=True) for limit in limits)

    return ItemLimits(warned(every), tuple(own), warned(of_markers), warned(scoped))


def _with_sizes(test: _MarkedTest, limit: Limit) -> Limit:
    """Return a limit on a law with the sizes of all tests of the function; any other as it is.

    Raises:
        LimitError: if the test is not parametrized by a size.
    """
    if not hasattr(limit, "degrees"):  # not imported for sessions without such a limit
        return limit
    from pytest_cka_memory.limits.laws import PeakLaw, with_points

    assert isinstance(limit, PeakLaw)
    names = list(limit.degrees)
    others = {name: value for name, value in test.parameters.items() if name not in names}
    points = {}
    for sibling in test.siblings().values():
        known = parameters(sibling)
        if {name: value for name, value in known.items() if name not in names} != others:
            continue
        points[sibling.nodeid] = [known.get(name) for name in names]
        test.compared.setdefault(sibling.nodeid, ComparedTest()).additions.add(limit.addition)

    def find(nodeid: str, label: str) -> RegionRecord | None:
        region = test.compared[nodeid].regions.get(label)
        return None if region is None else region.record

    return with_points(limit, test.nodeid, points, find)


def _closest(marks: "Sequence[tuple[Node, pytest.Mark]]") -> pytest.Mark:
    """Return the last marker of the nearest node that has one.

    ``get_closest_marker`` returns the first of that node: a function's before its
    ``pytest.param``'s, a base class's before its subclass's, a decorator's before an applied one.
    """
    return next(mark for node, mark in reversed(marks) if node is marks[0][0])


def _closest_of_each(marks: "Sequence[tuple[Node, pytest.Mark]]") -> list[pytest.Mark]:
    """Return the closest of the markers that judge the same: with equal ``scope`` and ``of``."""
    by_subject: dict[str, list[tuple[Node, pytest.Mark]]] = {}
    for node, mark in marks:
        # As text, because a user may have written anything; the limit's builder refuses it.
        subject = repr([mark.kwargs.get("scope", "function"), mark.kwargs.get("of", "allocated")])
        by_subject.setdefault(subject, []).append((node, mark))
    return [_closest(same) for same in by_subject.values()]


def _limits_of_baseline_marker(test: _MarkedTest, mark: pytest.Mark) -> list[Limit]:
    """Return what the baseline allows, and the relations to other tests that the marker names."""
    baseline = test.settings.baseline
    own: Tolerance | None = limit_from_marker(mark.name, mark.args, mark.kwargs)
    tolerance = own or baseline.tolerance
    limits: list[Limit] = []
    is_compared = not RELATIONS.isdisjoint(mark.kwargs)
    if is_compared:
        limits += _relations(test, mark, tolerance)
    # Who compares a test with another may have no committed figures of it.
    if not is_compared or baseline.updating or baseline.required or baseline.has(test.nodeid):
        text = mark.name if own is None else f"{mark.name}({own.text!r})"
        text = with_argument(text, "warn=True") if only_warns(mark.kwargs) else text
        limits += _committed(test, text, tolerance)
    return [replace(limit, warns=only_warns(mark.kwargs)) for limit in limits]


def _committed(test: _MarkedTest, text: str, tolerance: "Tolerance") -> list[Limit]:
    """Return the limit that the baseline sets on this device; none while baselines are updated."""
    baseline, meter = test.settings.baseline, test.meter
    if baseline.updating:
        return []
    return [baseline.limit(text, test.nodeid, None if meter is None else meter.facts(), tolerance)]


_Siblings = dict[tuple[str, ...], pytest.Item]
_functions_key = pytest.StashKey[tuple[int, dict[tuple[int, str], _Siblings]]]()
"""The number of tests, and the tests of each function of a module or class."""


def _relations(test: _MarkedTest, mark: pytest.Mark, tolerance: "Tolerance") -> list[Limit]:
    """Return the limits on a test that is compared with others; none for such another test itself.

    A name in the marker's arguments is the id of a parameter: the other test has it, and the same
    other parameters.

    Raises:
        LimitError: if there is no such test, or an argument is wrong.
    """
    from pytest_cka_memory.core.relations import RelationLimit, relations_of

    siblings = test.siblings()
    arguments = {name: value for name, value in mark.kwargs.items() if name in RELATIONS}
    text = call_text(mark.name, mark.args, mark.kwargs)
    facts = {} if test.meter is None else test.meter.facts()
    limits: list[Limit] = []
    for relation in relations_of(**arguments, tolerance=tolerance):
        other = _with_parameter(siblings, test.ids, relation.other)
        if other is None:
            argument, value = next(it for it in arguments.items() if relation.other in str(it[1]))
            raise LimitError(
                f"{argument}={value!r}: no collected test of this function has the parameter id "
                f"{relation.other!r} and is the same in all other parameters; write an id from "
                "@pytest.mark.parametrize, and select both tests"
            )
        kept = test.compared.setdefault(other.nodeid, ComparedTest())
        limit = RelationLimit(text, relation, other.nodeid, kept.regions.get, facts)
        kept.additions.update({limit.addition} - {""})
        if other.nodeid != test.nodeid:
            limits.append(limit)
    return limits


def _siblings_of(item: pytest.Item) -> _Siblings:
    """Return the tests of the same function by the ids of their parameters."""
    count, functions = item.session.stash.get(_functions_key, (0, {}))
    if count != len(item.session.items):  # others were selected since
        functions = {}
        for other in item.session.items:
            function = (id(other.parent), getattr(other, "originalname", ""))
            functions.setdefault(function, {})[parameter_ids(other)] = other
        item.session.stash[_functions_key] = len(item.session.items), functions
    return functions.get((id(item.parent), getattr(item, "originalname", item.name)), {})


def _with_parameter(
    siblings: _Siblings, ids: tuple[str, ...], replacement: str
) -> pytest.Item | None:
    """Return the test whose parameters are `ids` with one of them replaced; None if there is none.

    If `replacement` is itself one of `ids`, the test with these is returned.
    """
    others = [(*ids[:at], replacement, *ids[at + 1 :]) for at in range(len(ids))]
    wanted = [ids] if replacement in ids else others
    return next((siblings[each] for each in wanted if each in siblings), None)
