"""Limits over all tests of a class or module, with its set-up and tear-down.

The region of a class begins before the first of its tests is set up, and ends when the last one has
been torn down, so that what ``setUpClass`` makes and ``tearDownClass`` forgets is found.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.fixture_names import scope_nodeid
from pytest_cka_memory.core.verdicts import Limit, Result, judge
from pytest_cka_memory.measure.probe import MemoryProbe
from pytest_cka_memory.plugin.failures import fail
from pytest_cka_memory.plugin.item.fixture_regions import regions_of
from pytest_cka_memory.plugin.item.plan import plan_of
from pytest_cka_memory.plugin.pytest_private import drop_instance, terminal_width
from pytest_cka_memory.plugin.session.meter import meter_of
from pytest_cka_memory.plugin.session.settings import settings_key

if TYPE_CHECKING:
    from pytest_cka_memory.core.figures import RegionRecord


class _ScopeRegion:
    """The region of one class or module, while it is open."""

    def __init__(self, item: pytest.Item, scope: str, limits: Sequence[Limit]) -> None:
        self.has_failed = False
        """Whether one of its tests has failed: its traceback may hold tensors."""
        self._limits, self._item = limits, item
        node = _node_of(item, scope)
        assert node is not None, "the plan has checked it"
        self._nodeid: str = scope_nodeid(node.nodeid, scope)
        also = {limit.addition for limit in limits} - {""}
        self._probe: MemoryProbe = MemoryProbe(
            meter=meter_of(item.config), explainer=self, also=also
        )
        self._block: AbstractContextManager[Any] = self._probe.measure("all tests")
        self._block.__enter__()

    def figures_to_explain(self, record: "RegionRecord") -> Collection[str]:
        """Return the figures that are too high."""
        breaches = judge(self._nodeid, record, self._limits).breaches
        return {breach.figure for breach in breaches if breach.measured_bytes is not None}

    def named_values(self) -> Mapping[str, Any]:
        """Return nothing: the values of fixtures are gone when the region ends."""
        return {}

    @property
    def draws_paths(self) -> bool:
        """Whether the session asks for a picture of the references to what is retained."""
        return self._item.config.stash[settings_key].draws_paths

    def end(self) -> Result:
        """End the region and judge it; it is not judged if one of its tests has failed."""
        self._block.__exit__(None, None, None)
        (record,) = self._probe.records
        record = replace(record, label="", completed=not self.has_failed)
        return judge(self._nodeid, record, self._limits)

    def failure_of(self, result: Result) -> str:
        """Return the text about the limits that are broken and do not only warn."""
        from pytest_cka_memory.reports import failure

        width = min(failure.WIDTH, terminal_width(self._item.config))
        return failure.render([result], self._probe.meter.facts(), width)


_open_key = pytest.StashKey[dict[tuple[str, int], _ScopeRegion]]()
"""Scope and identity of its node -> its region."""


def _node_of(item: pytest.Item, scope: str) -> pytest.Collector | None:
    if scope == "class":
        return item.getparent(pytest.Class)
    return item.getparent(pytest.Module)


def begin(item: pytest.Item) -> None:
    """Open the regions of the class and module of `item` that limits ask for."""
    limits = plan_of(item).scoped_limits
    still_open = item.config.stash.setdefault(_open_key, {})
    for scope in sorted({limit.scope for limit in limits}, reverse=True):  # the module first
        key = scope, id(_node_of(item, scope))
        if key not in still_open:
            of_scope = [limit for limit in limits if limit.scope == scope]
            still_open[key] = _ScopeRegion(item, scope, of_scope)


def note_failure(item: pytest.Item) -> None:
    """Take note that a test has failed, whose traceback may hold what it has allocated."""
    for region in item.config.stash.get(_open_key, {}).values():
        region.has_failed = True


def end(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the regions that `nextitem` does not belong to; fail the teardown if one is too high."""
    still_open = item.config.stash.get(_open_key, {})
    around = set() if nextitem is None else {id(node) for node in nextitem.listchain()}
    ended = [key for key in still_open if key[1] not in around]
    if not ended:
        return
    _drop_values(item)
    texts: list[str] = []
    results: list[Result] = []
    for key in sorted(ended):  # the class before the module
        region = still_open.pop(key)
        result = region.end()
        results.append(result)
        regions_of(item.config).add_result(result)
        texts += filter(None, [region.failure_of(result)])
    if texts:
        from pytest_cka_memory.reports import failure

        fail("\n".join(texts), failure.headline(results))


def _drop_values(item: pytest.Item) -> None:
    """Drop the values of the fixtures of a test that was torn down, before pytest does."""
    getattr(item, "funcargs", {}).clear()
    drop_instance(item)
