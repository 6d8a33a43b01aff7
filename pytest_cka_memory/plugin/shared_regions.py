"""Regions that belong to no single test: those of fixtures, and of whole classes and modules.

A fixture measures with ``cka_memory_session`` or a ``MemoryProbe`` of its own. Regions of a fixture
for one test belong to that test. Others get a name of their own and travel on the report of the
test during which they ended, so that pytest-xdist delivers them too.

The region of a class begins before the first of its tests is set up, and ends when the last one has
been torn down, so that what ``setUpClass`` allocates and ``tearDownClass`` does not free is found.
"""

import inspect
import os
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.report import fixture_nodeid, scope_nodeid
from pytest_cka_memory.errors import BaselineError
from pytest_cka_memory.measure import observe_regions
from pytest_cka_memory.plugin import is_narrowed
from pytest_cka_memory.plugin.device import known_meter, meter_of
from pytest_cka_memory.plugin.plan import plan_of
from pytest_cka_memory.plugin.pytest_private import drop_instance, fail, terminal_width
from pytest_cka_memory.plugin.settings import settings_key

if TYPE_CHECKING:
    from pytest_cka_memory.core.figures import RegionRecord
    from pytest_cka_memory.core.report import Payload
    from pytest_cka_memory.core.verdicts import Limit, Result
    from pytest_cka_memory.measure.probe import MemoryProbe


_Ended = list[tuple["MemoryProbe", "RegionRecord"]]


class FixtureRegions:
    """Collects the regions of fixtures; registered in every process that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._probe: MemoryProbe | None = None
        self._setting_up: list[_Ended] = []
        """The regions of each fixture that is being set up, the innermost last."""
        self._pending: _Ended = []
        """Regions that ended while no fixture was set up: in the teardown of one, or in a test."""
        self._results: list[Result] = []
        """What the next report takes along."""
        self._labels: Counter[tuple[str, str]] = Counter()
        self._unmeasured: list[str] = []
        self.is_running = False
        """Whether a test is being set up, called or torn down."""
        self.is_called = False
        """Whether the test itself runs, not a fixture."""

    def session_probe(self) -> "MemoryProbe":
        """Return the probe of ``cka_memory_session``.

        Raises:
            pytest.UsageError: if the device is not available.
        """
        if self._probe is None:
            from pytest_cka_memory.measure.probe import MemoryProbe

            # Equal labels are numbered for each fixture.
            self._probe = MemoryProbe(meter=meter_of(self._config), numbers_labels=False)
        return self._probe

    def end_session_probe(self) -> None:
        """End the regions of ``cka_memory_session`` that are still open, which is a mistake."""
        if self._probe is not None:
            from pytest_cka_memory.measure.region_context import never_closed

            left_open = self._probe.end_open()
            unused = [context.mistake for context in self._probe.unused]
            mistakes = [*unused, *([never_closed(left_open)] if left_open else [])]
            self._probe = None
            if mistakes:
                fail("\n".join(mistakes))

    def add_result(self, result: "Result") -> None:
        """Let the next report of this process take a result along that belongs to no test."""
        outcome = "passed" if result.record.completed else "error"
        self._results.append(replace(result, outcome=outcome))

    def pytest_configure(self) -> None:
        self._end_observing = observe_regions(self._observe)

    def pytest_unconfigure(self) -> None:
        self._end_observing()

    def _observe(self, probe: "MemoryProbe", record: "RegionRecord") -> None:
        if self._setting_up:
            self._setting_up[-1].append((probe, record))
        elif probe is self._probe or (self.is_running and not self.is_called):
            self._pending.append((probe, record))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        ended: _Ended = []
        self._setting_up.append(ended)
        try:
            return (yield)
        finally:
            self._setting_up.pop()
            if ended:  # at the set-up of few fixtures
                self._add(ended, fixturedef, request)

    def pytest_fixture_post_finalizer(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> None:
        if self._pending:
            ended, self._pending = self._pending, []
            self._add(ended, fixturedef, request)

    def add_to(self, report: pytest.TestReport, item: pytest.Item) -> None:
        """Let the report of a phase take along the regions that have ended; `item` is the test."""
        self.is_running = report.when != "teardown"
        if self._pending:
            ended, self._pending = self._pending, []
            own = [record for probe, record in ended if probe is self._probe]
            self._add_results(item.nodeid, own)
        if self._results or self._unmeasured:
            payload = getattr(report, "cka_memory", None) or self._empty_payload()
            payload["fixtures"] = [result.filled() for result in self._results]
            payload["unmeasured"] = [*payload["unmeasured"], *self._unmeasured]
            report.cka_memory = payload  # type: ignore[attr-defined]
            self._results, self._unmeasured = [], []

    def _empty_payload(self) -> "Payload":
        return {
            "facts": meter_of(self._config).facts(),
            "regions": [],
            "unmeasured": [],
            "narrowed": is_narrowed(self._config),
        }

    def _add(
        self, ended: "_Ended", fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> None:
        """Add regions of a fixture under its name, or under that of its only test."""
        records = [record for probe, record in ended if self._is_ours(probe, fixturedef, record)]
        if not records:
            return
        if fixturedef.scope == "function":
            named = f"(fixture {fixturedef.argname})"
            self._add_results(
                request.node.nodeid, [replace(r, label=f"{r.label} {named}") for r in records]
            )
        else:
            self._add_results(self._nodeid(fixturedef, request), records)

    def _is_ours(
        self, probe: "MemoryProbe", fixturedef: pytest.FixtureDef[Any], record: "RegionRecord"
    ) -> bool:
        """Whether the probe measures what the session measures; otherwise it is counted."""
        meter = known_meter(self._config)
        if meter is None:
            try:
                meter = meter_of(self._config)
            except pytest.UsageError:  # the device of the session is not available
                return False
        from pytest_cka_memory.core.conditions import fingerprint_of

        if fingerprint_of(probe.meter.facts()) == fingerprint_of(meter.facts()):
            return True
        self._unmeasured.append(
            f"region {record.label!r} of a MemoryProbe on {probe.meter.device} in fixture "
            f"{fixturedef.argname}, because this session measures {meter.device}"
        )
        return False

    def _nodeid(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> str:
        in_session = fixturedef.scope == "session"
        place = "" if in_session else request.node.nodeid
        name = fixturedef.argname
        if hasattr(request, "param"):
            name += f"[{getattr(request, 'param_index', '')}]"
        return fixture_nodeid(place or self._file_of(fixturedef), name, fixturedef.scope)

    def _file_of(self, fixturedef: pytest.FixtureDef[Any]) -> str:
        """Return the file that defines a fixture; its module if it is not below pytest's root."""
        function = inspect.unwrap(fixturedef.func)
        try:
            file = Path(os.path.relpath(inspect.getfile(function), self._config.rootpath))
        except (TypeError, ValueError):  # a callable object, or a file on another drive
            file = Path(os.pardir)
        if file.parts[0] == os.pardir:
            return str(getattr(function, "__module__", None) or fixturedef.baseid)
        return file.as_posix()

    def _add_results(self, nodeid: str, records: "Sequence[RegionRecord]") -> None:
        from pytest_cka_memory.core.verdicts import judge

        for record in records:
            self._labels[nodeid, record.label] += 1
            number = self._labels[nodeid, record.label]
            label = f"{record.label} #{number}" if number > 1 else record.label
            result = judge(nodeid, replace(record, label=label), self._limits(nodeid))
            outcome = "passed" if record.completed else "error"
            self._results.append(replace(result, outcome=outcome))

    def _limits(self, nodeid: str) -> "list[Limit]":
        """Return the limit of the baseline, if the session compares with one; no other applies."""
        plan = self._config.stash[settings_key].baseline
        if not plan.named or plan.updating:
            return []
        facts = meter_of(self._config).facts()
        try:
            limit = plan.limit("--cka-memory-baseline", nodeid, facts, plan.tolerance)
        except BaselineError:  # every measured test fails with it
            return []
        return [replace(limit, warns=self._config.stash[settings_key].only_warns)]


_regions_key = pytest.StashKey[FixtureRegions]()


def collect(config: pytest.Config) -> None:
    """Collect the regions of fixtures from now on."""
    regions = config.stash[_regions_key] = FixtureRegions(config)
    config.pluginmanager.register(regions, "cka_memory_fixture_regions")


def regions_of(config: pytest.Config) -> FixtureRegions:
    """Return what collects the regions of fixtures in this session."""
    return config.stash[_regions_key]


class _ScopeRegion:
    """The region of one class or module, while it is open."""

    def __init__(self, item: pytest.Item, scope: str, limits: "Sequence[Limit]") -> None:
        self.has_failed = False
        """Whether one of its tests has failed: its traceback may hold tensors."""
        from pytest_cka_memory.measure.probe import MemoryProbe

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
        from pytest_cka_memory.core.verdicts import judge

        breaches = judge(self._nodeid, record, self._limits).breaches
        return {breach.figure for breach in breaches if breach.measured_bytes is not None}

    def named_values(self) -> Mapping[str, Any]:
        """Return nothing: the values of fixtures are gone when the region ends."""
        return {}

    @property
    def draws_paths(self) -> bool:
        """Whether the session asks for a picture of the references to what is retained."""
        return self._item.config.stash[settings_key].draws_paths

    def end(self) -> "Result":
        """End the region and judge it; it is not judged if one of its tests has failed."""
        from pytest_cka_memory.core.verdicts import judge

        self._block.__exit__(None, None, None)
        (record,) = self._probe.records
        record = replace(record, label="", completed=not self.has_failed)
        return judge(self._nodeid, record, self._limits)

    def failure_of(self, result: "Result") -> str:
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


def begin_scopes(item: pytest.Item) -> None:
    """Open the regions of the class and module of `item` that limits ask for."""
    limits = plan_of(item).scoped_limits
    if _open_key not in item.config.stash:
        item.config.stash[_open_key] = {}
        item.config.pluginmanager.register(_ScopeHooks(), "cka_memory_scopes")
    still_open = item.config.stash[_open_key]
    for scope in sorted({limit.scope for limit in limits}, reverse=True):  # the module first
        key = scope, id(_node_of(item, scope))
        if key not in still_open:
            of_scope = [limit for limit in limits if limit.scope == scope]
            still_open[key] = _ScopeRegion(item, scope, of_scope)


def note_failure_in_scopes(item: pytest.Item) -> None:
    """Take note that a test has failed, whose traceback may hold what it has allocated."""
    for region in item.config.stash.get(_open_key, {}).values():
        region.has_failed = True


class _ScopeHooks:
    """The hooks of a session in which regions of classes or modules are open."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        try:
            result = yield
        except BaseException:
            note_failure_in_scopes(item)
            raise
        finally:
            _end_scopes(item, nextitem)
        return result


def _end_scopes(item: pytest.Item, nextitem: pytest.Item | None) -> None:
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
