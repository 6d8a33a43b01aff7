"""Every limit on one test: of its markers, of other plugins, of options and of the baseline.

Imported with the first test that may have limits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.markers import MARKERS, NO_ALLOCATIONS, RELATIONS
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.limits import (
    FlatPerBatch,
    Maximum,
    call_text,
    default_limits,
    limit_from_marker,
    only_warns,
    with_argument,
)
from pytest_cka_memory.plugin.device import known_meter
from pytest_cka_memory.plugin.pytest_private import fail, parameter_ids, parameters
from pytest_cka_memory.plugin.settings import settings_key
from pytest_cka_memory.stored.plan import MARKER as BASELINE_MARKER
from pytest_cka_memory.units import is_plain_number

if TYPE_CHECKING:
    from pytest_cka_memory.core.relations import ComparedRegion
    from pytest_cka_memory.core.tolerance import Tolerance
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


def limits_of(item: pytest.Item, compared: dict[str, ComparedTest]) -> ItemLimits:
    """Return every limit on a test that is measured.

    Args:
        item: the test.
        compared: by its name, each test with which others are compared; those with which `item` is
            compared are added.

    Raises:
        LimitError: if a marker or another plugin's limit cannot be used.
        BaselineError: if the baseline file cannot be used.
    """
    settings = item.config.stash[settings_key]
    marks: dict[str, list[tuple[Node, pytest.Mark]]] = {}
    for node, mark in item.iter_markers_with_node():
        marks.setdefault(mark.name, []).append((node, mark))
    if NO_ALLOCATIONS in marks:
        mark = _closest(marks[NO_ALLOCATIONS])
        if mark.args or mark.kwargs:
            text = call_text(NO_ALLOCATIONS, mark.args, mark.kwargs)
            raise LimitError(f"{text}: it takes no arguments; write @pytest.mark.{NO_ALLOCATIONS}")
    marked: list[Limit] = [
        limit_from_marker(mark.name, mark.args, mark.kwargs)
        for name in MARKERS
        for mark in _closest_of_each(marks.get(name, ()))
        if name != BASELINE_MARKER
    ]
    if BASELINE_MARKER in marks:
        marked += _limits_of_baseline_marker(item, _closest(marks[BASELINE_MARKER]), compared)
    marked = [_with_sizes(item, limit, compared) for limit in marked]
    growing = frozenset(limit.of for limit in marked if isinstance(limit, FlatPerBatch))
    marked = [
        replace(limit, others=growing) if isinstance(limit, FlatPerBatch) else limit
        for limit in marked
    ]
    scoped = [limit for limit in marked if limit.scope != "function"]
    for limit in scoped:
        if limit.scope == "class" and item.getparent(pytest.Class) is None:
            raise LimitError(f"{limit.text}: the test is in no class; write scope='module'")
    of_markers = [limit for limit in marked if limit.scope == "function"]
    own = [*of_markers, *limits_of_plugins(item)]
    every = own + default_limits(own, settings.max_retained_bytes, settings.max_peak_bytes)
    if settings.baseline.named and BASELINE_MARKER not in marks:
        every += _committed(item, "--cka-memory-baseline", settings.baseline.tolerance)

    def warned(limits: Sequence[Limit]) -> tuple[Limit, ...]:
        if not settings.only_warns:
            return tuple(limits)
        return tuple(replace(limit, warns=True) for limit in limits)

    return ItemLimits(warned(every), tuple(own), warned(of_markers), warned(scoped))


def _with_sizes(item: pytest.Item, limit: Limit, compared: dict[str, ComparedTest]) -> Limit:
    """Return a limit on a law with the sizes of all tests of the function; any other as it is.

    Raises:
        LimitError: if the test is not parametrized by a size.
    """
    if not hasattr(limit, "degrees"):  # not imported for sessions without such a limit
        return limit
    from pytest_cka_memory.limits.laws import PeakLaw, with_points

    assert isinstance(limit, PeakLaw)
    names = list(limit.degrees)
    own = parameters(item)
    others = {name: value for name, value in own.items() if name not in names}
    points = {}
    for sibling in _siblings_of(item).values():
        known = parameters(sibling)
        if {name: value for name, value in known.items() if name not in names} != others:
            continue
        points[sibling.nodeid] = [known.get(name) for name in names]
        compared.setdefault(sibling.nodeid, ComparedTest()).additions.add(limit.addition)

    def find(nodeid: str, label: str) -> RegionRecord | None:
        region = compared[nodeid].regions.get(label)
        return None if region is None else region.record

    return with_points(limit, item.nodeid, points, find)


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


def _limits_of_baseline_marker(
    item: pytest.Item, mark: pytest.Mark, compared: dict[str, ComparedTest]
) -> list[Limit]:
    """Return what the baseline allows, and the relations to other tests that the marker names."""
    baseline = item.config.stash[settings_key].baseline
    given: Tolerance | None = limit_from_marker(mark.name, mark.args, mark.kwargs)
    tolerance = given or baseline.tolerance
    limits: list[Limit] = []
    is_compared = not RELATIONS.isdisjoint(mark.kwargs)
    if is_compared:
        limits += _relations(item, mark, tolerance, compared)
    # Who compares a test with another may have no committed figures of it.
    if not is_compared or baseline.updating or baseline.required or baseline.has(item.nodeid):
        text = mark.name if given is None else f"{mark.name}({given.text!r})"
        text = with_argument(text, "warn=True") if only_warns(mark.kwargs) else text
        limits += _committed(item, text, tolerance)
    return [replace(limit, warns=only_warns(mark.kwargs)) for limit in limits]


def _committed(item: pytest.Item, text: str, tolerance: "Tolerance") -> list[Limit]:
    """Return the limit that the baseline sets on this device; none while baselines are updated."""
    baseline, meter = item.config.stash[settings_key].baseline, known_meter(item.config)
    if baseline.updating:
        return []
    return [baseline.limit(text, item.nodeid, None if meter is None else meter.facts(), tolerance)]


_Siblings = dict[tuple[str, ...], pytest.Item]
_functions_key = pytest.StashKey[tuple[int, dict[tuple[int, str], _Siblings]]]()
"""The number of tests, and the tests of each function of a module or class."""


def _relations(
    item: pytest.Item, mark: pytest.Mark, tolerance: "Tolerance", compared: dict[str, ComparedTest]
) -> list[Limit]:
    """Return the limits on a test that is compared with others; none for such another test itself.

    A name in the marker's arguments is the id of a parameter: the other test has it, and the same
    other parameters.

    Raises:
        LimitError: if there is no such test, or an argument is wrong.
    """
    from pytest_cka_memory.core.relations import RelationLimit, relations_of

    siblings = _siblings_of(item)
    arguments = {name: value for name, value in mark.kwargs.items() if name in RELATIONS}
    text, meter = call_text(mark.name, mark.args, mark.kwargs), known_meter(item.config)
    facts = {} if meter is None else meter.facts()
    limits: list[Limit] = []
    for relation in relations_of(**arguments, tolerance=tolerance):
        other = _with_parameter(siblings, parameter_ids(item), relation.other)
        if other is None:
            argument, value = next(it for it in arguments.items() if relation.other in str(it[1]))
            raise LimitError(
                f"{argument}={value!r}: no test of this function with the parameter "
                f"{relation.other!r}, and otherwise the same parameters, was collected; write the "
                "id of a parameter, and select both tests"
            )
        kept = compared.setdefault(other.nodeid, ComparedTest())
        limit = RelationLimit(text, relation, other.nodeid, kept.regions.get, facts)
        kept.additions.update({limit.addition} - {""})
        if other is not item:
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
    """Return the test with one of the parameters `ids` replaced, or with these if it is one."""
    others = [(*ids[:at], replacement, *ids[at + 1 :]) for at in range(len(ids))]
    wanted = [ids] if replacement in ids else others
    return next((siblings[each] for each in wanted if each in siblings), None)


LIMITS = "pytest_cka_memory_limits"
_of_plugins_key = pytest.StashKey["list[Limit] | LimitError"]()


def limits_of_plugins(item: pytest.Item) -> list[Limit]:
    """Return the limits that other plugins set for `item`; calls the hook once per test.

    Raises:
        LimitError: if a plugin returns something else than a list of limits; it names the plugin
            and the hook.
    """
    if _of_plugins_key not in item.stash:
        try:
            item.stash[_of_plugins_key] = list(_limits_from_hook(item))
        except LimitError as error:
            item.stash[_of_plugins_key] = error
    found = item.stash[_of_plugins_key]
    if isinstance(found, LimitError):
        raise found
    return found


def _limits_from_hook(item: pytest.Item) -> Iterator[Limit]:
    for plugin_name, returned in call_each_plugin(LIMITS, LimitError, {"item": item}):
        if not isinstance(returned, (list, tuple)) or not all(map(_is_limit, returned)):
            raise LimitError(
                f"{plugin_name}: {LIMITS} returned {returned!r}; return a list of limits, "
                "e.g. [pytest_cka_memory.limits.max_peak_mb(512)]"
            )
        for limit in returned:
            ours = type(limit) in (Maximum, FlatPerBatch)
            yield limit if ours else PluginLimit(limit.text, limit, plugin_name)


def _is_limit(value: object) -> bool:
    return isinstance(value, Limit) and type(value.text) is str


def call_each_plugin(
    hook: str, error: type[Exception], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Call a hook of one plugin at a time; yield the plugin's name and what it returned."""
    item = arguments["item"]
    implementations = getattr(item.ihook, hook).get_hookimpls()
    plugins = [implementation.plugin for implementation in implementations]
    for implementation in implementations:
        others = [plugin for plugin in plugins if plugin is not implementation.plugin]
        one = item.config.pluginmanager.subset_hook_caller(hook, others)
        try:
            returned = one(**arguments)
        except Exception as raised:
            problem = f"{hook} raised {type(raised).__name__}: {raised}"
            raise error(f"{implementation.plugin_name}: {problem}") from raised
        yield from ((implementation.plugin_name, value) for value in returned)


@dataclass(frozen=True)
class PluginLimit(Limit):
    """Wraps a limit of another plugin and checks the type of each verdict.

    Otherwise a wrong one would pass silently.
    """

    inner: Limit
    plugin_name: str

    @property
    def addition(self) -> str:
        return str(self.inner.addition)

    @property
    def judges_device(self) -> bool:
        return bool(self.inner.judges_device)

    def judge(self, record: RegionRecord) -> Verdict:
        raise NotImplementedError("a plugin's limit may have several verdicts")

    def verdicts(self, record: RegionRecord) -> Sequence[Verdict]:
        try:
            verdicts = list(self.inner.verdicts(record))
        except Exception as error:
            self._fail(f"raised {type(error).__name__}: {error}")
        for verdict in verdicts:
            if not _is_verdict(verdict):
                self._fail(
                    f"returned {verdict!r}; return None, an Unjudged, or a Breach of texts and "
                    "plain numbers"
                )
        return verdicts

    def _fail(self, wrong: str) -> None:
        # Fails the test at once, because no caller at the end of a region handles an exception.
        fail(f"{self.plugin_name}: {LIMITS}: limit {self.text} {wrong}")


def _is_verdict(value: object) -> bool:
    if value is None:
        return True
    if isinstance(value, Unjudged):
        return type(value.limit) is type(value.reason) is str
    return (
        isinstance(value, Breach)
        and all(type(text) is str for text in (value.limit, value.message, value.figure))
        and is_plain_number(value.allowed_bytes)
        and (value.measured_bytes is None or is_plain_number(value.measured_bytes))
    )
