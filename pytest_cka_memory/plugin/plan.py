"""The plan of one test: whether it is measured, and by which limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pytest_cka_memory.core.markers import FIXTURE, MARKERS, NO_ALLOCATIONS
from pytest_cka_memory.errors import BaselineError, LimitError
from pytest_cka_memory.plugin import given_by
from pytest_cka_memory.plugin.device import known_meter
from pytest_cka_memory.plugin.pytest_private import fail
from pytest_cka_memory.plugin.settings import Settings, settings_key
from pytest_cka_memory.stored import MARKER as BASELINE_MARKER

if TYPE_CHECKING:
    from pytest_cka_memory.limits import Limit
    from pytest_cka_memory.meters.base import Meter
    from pytest_cka_memory.plugin.item_limits import ComparedTest
    from pytest_cka_memory.plugin.pytest_private import Node


@dataclass(frozen=True)
class ItemPlan:
    """What the plugin does with one test."""

    nodeid: str
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

    def usable_limits(self) -> "tuple[Limit, ...]":
        """Return :attr:`limits`; fail the test if they cannot be used.

        Most sessions have stopped at :func:`check` in that case. An xdist worker cannot stop there,
        and a marker can be added later.
        """
        if self.error is not None:
            fail(f"{self.nodeid}: {self.error}", str(self.error))
        return self.limits


class _Computed(NamedTuple):
    """A plan, and what it was computed from."""

    plan: ItemPlan
    nodes: "Sequence[Node]"
    """The test and each node around it."""
    marks: Sequence[pytest.Mark]
    """Those of all nodes."""
    mark_ids: Sequence[int]
    meter: "Meter | None"
    depends_on_meter: bool
    """Whether a baseline, which has figures of one device, may set a limit."""


def _with_parents(item: pytest.Item) -> "list[Node]":
    nodes: list[Node] = []
    node: Node | None = item
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes


_plan_key = pytest.StashKey[_Computed]()
compared_key: "pytest.StashKey[dict[str, ComparedTest]]" = pytest.StashKey()
"""Test -> what is kept of it because others are compared with it."""


def plan_of(item: pytest.Item) -> ItemPlan:
    """Return the plan of `item`.

    It is computed at collection, and again only if a fixture or the test has changed its markers,
    or if the device has become known since, because baselines depend on it.
    """
    # Asked for several times for each test, so without the generator item.iter_markers(). By
    # identity, because the arguments of two markers may be tensors, which have no equality.
    computed: _Computed | None
    try:
        computed = item.stash[_plan_key]
    except KeyError:
        computed = None
    if (
        computed is None
        or (computed.depends_on_meter and computed.meter is not known_meter(item.config))
        or computed.mark_ids != [id(mark) for node in computed.nodes for mark in node.own_markers]
    ):
        nodes = _with_parents(item)
        marks = [mark for node in nodes for mark in node.own_markers]
        has_baseline = any(mark.name == BASELINE_MARKER for mark in marks)
        depends_on_meter = has_baseline or item.config.stash[settings_key].baseline.named
        meter = known_meter(item.config)
        plan = _compute(item, marks)
        ids = list(map(id, marks))
        computed = _Computed(plan, nodes, marks, ids, meter, depends_on_meter)
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


def _compute(item: pytest.Item, marks: Sequence[pytest.Mark]) -> ItemPlan:
    settings = item.config.stash[settings_key]
    try:
        is_measured = (
            settings.measures_all
            or FIXTURE in getattr(item, "fixturenames", ())
            or any(mark.name in MARKERS for mark in marks)
            or settings.baseline.measures(item.nodeid)
        )
        if not _may_have_limits(item, settings, marks):
            return ItemPlan(item.nodeid, is_measured)
        # Late, because a session that only reports figures needs no limits.
        from pytest_cka_memory.plugin import item_limits, other_plugins

        of_plugins = other_plugins.limits_of_plugins(item)
        if not is_measured and not of_plugins:
            return ItemPlan(item.nodeid, is_measured=False)
        compared = item.config.stash.setdefault(compared_key, {})
        limits = item_limits.limits_of(item, of_plugins, compared)
    except (LimitError, BaselineError) as error:
        return ItemPlan(item.nodeid, is_measured=True, error=error)
    return ItemPlan(
        item.nodeid,
        is_measured=True,
        limits=limits.all,
        own_limits=limits.own,
        scoped_limits=limits.scoped,
        marker_limits=limits.of_markers,
    )


def _may_have_limits(item: pytest.Item, settings: Settings, marks: Sequence[pytest.Mark]) -> bool:
    return (
        any(mark.name in MARKERS or mark.name == NO_ALLOCATIONS for mark in marks)
        or settings.has_default_limits
        or settings.baseline.named
        or bool(item.config.hook.pytest_cka_memory_limits.get_hookimpls())
    )
