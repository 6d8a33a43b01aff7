"""The plan of one test: whether it is measured, and by which limits. Computed once per test."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.markers import FIXTURE, MARKERS, NO_ALLOCATIONS, RELATIONS
from pytest_cka_memory.errors import BaselineError, LimitError
from pytest_cka_memory.plugin.device import known_meter
from pytest_cka_memory.plugin.options import given_by
from pytest_cka_memory.plugin.pytest_private import fail
from pytest_cka_memory.plugin.settings import Settings, settings_key
from pytest_cka_memory.stored.plan import MARKER as BASELINE_MARKER

if TYPE_CHECKING:
    from pytest_cka_memory.limits import Limit
    from pytest_cka_memory.meters.base import Meter
    from pytest_cka_memory.plugin.pytest_private import Node


@dataclass(frozen=True)
class ItemPlan:
    """What the plugin does with one test."""

    is_measured: bool
    limits: "tuple[Limit, ...]" = ()
    """Every limit that its regions are judged by."""
    own_limits: "tuple[Limit, ...]" = ()
    """Those of its markers and of other plugins, without those of the session's options."""
    scoped_limits: "tuple[Limit, ...]" = ()
    """Those that are judged over all tests of its class or module."""
    marker_limits: "tuple[Limit, ...]" = ()
    """Those of its markers."""
    error: LimitError | BaselineError | None = None
    """A marker, a plugin's limit or a baseline file that cannot be used; then it has no limits."""


@dataclass(frozen=True)
class _Computed:
    """A plan, and what it was computed from."""

    plan: ItemPlan
    marks: tuple[tuple[pytest.Mark, ...], ...]
    """Those of the test, and of each node around it."""
    meter: "Meter | None"
    """None also if the plan is the same on every device."""
    depends_on_meter: bool

    def is_current(self, item: pytest.Item) -> bool:
        # Called eight times for each test, so without the generator item.iter_markers().
        node: Node | None = item
        for known in self.marks:
            own = node.own_markers if node is not None else ()
            if (own or known) and (len(own) != len(known) or not all(map(is_, own, known))):
                return False
            node = None if node is None else node.parent
        return not self.depends_on_meter or self.meter is known_meter(item.config)


_plan_key = pytest.StashKey[_Computed]()


def plan_of(item: pytest.Item) -> ItemPlan:
    """Return the plan of `item`.

    It is computed at collection, and again only if a fixture or the test has changed its markers,
    or if the device has become known since, because baselines depend on it.
    """
    computed = item.stash.get(_plan_key, None)
    if computed is None or not computed.is_current(item):
        marks = tuple(tuple(node.own_markers) for node in reversed(item.listchain()))
        meter, depends_on_meter = known_meter(item.config), _depends_on_meter(item)
        computed = _Computed(_compute(item), marks, meter, depends_on_meter)
        item.stash[_plan_key] = computed
    return computed.plan


def check(items: Sequence[pytest.Item]) -> None:
    """Compute the plan of every test, before any of them runs.

    Raises:
        pytest.UsageError: for wrong marker arguments, naming the tests; for a baseline file that
            cannot be used.
    """
    wrong = []
    for item in items:
        error = plan_of(item).error
        if isinstance(error, BaselineError):
            raise pytest.UsageError(f"{given_by(item.config, 'baseline')}: {error}")
        if error is not None:
            wrong.append(f"{item.nodeid}: {error}")
    if wrong:
        raise pytest.UsageError(*wrong)


def limits_or_fail(item: pytest.Item) -> "tuple[Limit, ...]":
    """Return the limits of `item`; fail the test if they cannot be used.

    Most sessions have stopped at :func:`check` in that case. An xdist worker cannot stop there, and
    a marker can be added later.
    """
    plan = plan_of(item)
    if plan.error is not None:
        fail(f"{item.nodeid}: {plan.error}", str(plan.error))
    return plan.limits


def _depends_on_meter(item: pytest.Item) -> bool:
    """Whether a baseline, which has figures of one device, may set a limit for `item`."""
    named = item.config.stash[settings_key].baseline.named
    return named or item.get_closest_marker(BASELINE_MARKER) is not None


def _compute(item: pytest.Item) -> ItemPlan:
    settings = item.config.stash[settings_key]
    try:
        if not _is_measured(item, settings):
            return ItemPlan(is_measured=False)
        all_of_markers = _marker_limits(item, settings)
        scoped = [limit for limit in all_of_markers if limit.scope != "function"]
        of_markers = [limit for limit in all_of_markers if limit.scope == "function"]
        _check_scopes(item, scoped)
        own = [*of_markers, *_limits_of_plugins(item)]
        limits = own + _default_limits(own, settings)
        if settings.baseline.named and item.get_closest_marker(BASELINE_MARKER) is None:
            limits += _baseline_limits(item, settings)
    except (LimitError, BaselineError) as error:
        return ItemPlan(is_measured=True, error=error)
    warned = _warned if settings.only_warns else _unchanged
    return ItemPlan(
        is_measured=True,
        limits=tuple(map(warned, limits)),
        own_limits=tuple(own),
        scoped_limits=tuple(map(warned, scoped)),
        marker_limits=tuple(map(warned, of_markers)),
    )


def _check_scopes(item: pytest.Item, scoped: "list[Limit]") -> None:
    for limit in scoped:
        if limit.scope == "class" and item.getparent(pytest.Class) is None:
            raise LimitError(f"{limit.text}: the test is in no class; write scope='module'")


def _is_measured(item: pytest.Item, settings: Settings) -> bool:
    return (
        settings.measures_all
        or FIXTURE in getattr(item, "fixturenames", ())
        or any(mark.name in MARKERS for mark in item.iter_markers())
        or settings.baseline.measures(item.nodeid)
        or bool(_limits_of_plugins(item))
    )


def _limits_of_plugins(item: pytest.Item) -> "list[Limit]":
    if not item.config.hook.pytest_cka_memory_limits.get_hookimpls():
        return []
    from pytest_cka_memory.plugin import item_limits

    return item_limits.limits_of_plugins(item)


def _default_limits(own: "list[Limit]", settings: Settings) -> "list[Limit]":
    if settings.max_retained_bytes is None and settings.max_peak_bytes is None:
        return []
    from pytest_cka_memory.limits import default_limits

    return default_limits(own, settings.max_retained_bytes, settings.max_peak_bytes)


def _limit_from_marker(mark: pytest.Mark) -> Any:
    from pytest_cka_memory.limits import limit_from_marker

    return limit_from_marker(mark.name, mark.args, mark.kwargs)


def _marker_limits(item: pytest.Item, settings: Settings) -> "list[Limit]":
    limits: list[Limit] = []
    given = {mark.name for mark in item.iter_markers()}
    allowing = _closest(item, NO_ALLOCATIONS) if NO_ALLOCATIONS in given else None
    if allowing is not None and (allowing.args or allowing.kwargs):
        from pytest_cka_memory.limits import call_text

        text = call_text(NO_ALLOCATIONS, allowing.args, allowing.kwargs)
        raise LimitError(f"{text}: it takes no arguments; write @pytest.mark.{NO_ALLOCATIONS}")
    for name in MARKERS:
        if name in given and name != BASELINE_MARKER:
            limits += map(_limit_from_marker, _closest_of_scopes(item, name))
    if BASELINE_MARKER in given:
        limits += _baseline_limits(item, settings)
    return limits


def _baseline_limits(item: pytest.Item, settings: Settings) -> "list[Limit]":
    """Return the relations to other tests, and what the baseline allows on this device.

    While baselines are updated, nothing is compared with them.
    """
    plan = settings.baseline
    text, tolerance, warns = "--cka-memory-baseline", plan.tolerance, False
    found: list[Limit] = []
    is_compared = False
    mark = _closest(item, BASELINE_MARKER)
    if mark is not None:
        from pytest_cka_memory.limits import call_text, only_warns, with_argument

        given, warns = _limit_from_marker(mark), only_warns(mark.kwargs)
        text = mark.name if given is None else f"{mark.name}({given.text!r})"
        text = with_argument(text, "warn=True") if warns else text
        tolerance = given or tolerance
        is_compared = not RELATIONS.isdisjoint(mark.kwargs)
        if is_compared:
            from pytest_cka_memory.plugin import item_limits

            as_written = call_text(mark.name, mark.args, mark.kwargs)
            found += item_limits.limits_of_relations(item, mark.kwargs, as_written, tolerance)
    meter = known_meter(item.config)
    # Who compares a test with another may have no committed figures of it.
    if not plan.updating and (not is_compared or plan.required or plan.has(item.nodeid)):
        facts = None if meter is None else meter.facts()
        found.append(plan.limit(text, item.nodeid, facts, tolerance))
    return [replace(limit, warns=warns) for limit in found]


def _closest_of_scopes(item: pytest.Item, name: str) -> list[pytest.Mark]:
    """Return the closest marker of each scope, as :func:`_closest` does for all of them."""
    found = list(item.iter_markers_with_node(name))
    scopes = dict.fromkeys(repr(mark.kwargs.get("scope", "function")) for _, mark in found)
    closest = []
    for scope in scopes:
        same = [it for it in found if repr(it[1].kwargs.get("scope", "function")) == scope]
        closest.append(next(mark for node, mark in reversed(same) if node is same[0][0]))
    return closest


def _unchanged(limit: "Limit") -> "Limit":
    return limit


def _warned(limit: "Limit") -> "Limit":
    return replace(limit, warns=True)


def _closest(item: pytest.Item, name: str) -> pytest.Mark | None:
    """Return the last marker of the nearest node that has one.

    ``get_closest_marker`` returns the first of that node: a function's before its
    ``pytest.param``'s, a base class's before its subclass's, a decorator's before an applied one.
    """
    found = list(item.iter_markers_with_node(name))
    return next((mark for node, mark in reversed(found) if node is found[0][0]), None)
