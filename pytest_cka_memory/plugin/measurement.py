"""The measurement of one test: its regions, their verdicts, and what travels on its report."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import pytest

from pytest_cka_memory.core.figure_rows import TIMELINE
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.growth import GROWTH_ON_HOST
from pytest_cka_memory.core.report import Payload
from pytest_cka_memory.core.verdicts import Limit, Result, judge
from pytest_cka_memory.errors import LimitWarning
from pytest_cka_memory.integrations.workers import this_rank
from pytest_cka_memory.measure.probe import MemoryProbe
from pytest_cka_memory.measure.region import Region
from pytest_cka_memory.measure.region_context import never_closed
from pytest_cka_memory.meters.base import Meter
from pytest_cka_memory.plugin import item_limits, kept_tracebacks
from pytest_cka_memory.plugin.device import meter_of
from pytest_cka_memory.plugin.judging import is_untouched, were_compared, without_kept_limits
from pytest_cka_memory.plugin.options import is_narrowed
from pytest_cka_memory.plugin.plan import limits_or_fail, plan_of
from pytest_cka_memory.plugin.pytest_private import fail, terminal_width, without_capture
from pytest_cka_memory.plugin.settings import settings_key
from pytest_cka_memory.reports import junit

if TYPE_CHECKING:
    from pytest_cka_memory.limits import FlatPerBatch


_KINDS = {
    "DoctestItem": "doctests",
    "TestCaseFunction": "async methods of a unittest.TestCase that is not IsolatedAsyncioTestCase",
}
"""Name of a class of pytest's -> what users call its items."""


def unseen_reason(item: pytest.Item) -> str:
    """Return why the code of an item of this kind cannot be measured."""
    name = type(item).__name__
    return f"{_KINDS.get(name, f'{name} items')} run their code in a way that cannot be measured"


def is_testcase(item: pytest.Item) -> bool:
    """Whether `item` is a method of a ``unittest.TestCase`` that pytest or unittest calls."""
    if type(item) is pytest.Function:  # a test of such a class is of a subclass
        return False
    unittest = sys.modules.get("unittest")  # not imported for a session that has no such test
    cls = getattr(item, "cls", None)
    if unittest is None or cls is None or not issubclass(cls, unittest.TestCase):
        return False
    # Only IsolatedAsyncioTestCase awaits an async method; other classes may call it in any way.
    return not _is_async(item) or issubclass(cls, unittest.IsolatedAsyncioTestCase)


def keeps_failed_subtests(item: pytest.Item) -> bool:
    """Whether unittest keeps the tracebacks of failed subtests while a test runs.

    Up to Python 3.10 it reports them when the test has ended, so nothing of them can be released.
    """
    outcome = getattr(getattr(item, "instance", None), "_outcome", None)
    return any(error for _, error in getattr(outcome, "errors", ()))


@contextmanager
def wrapped_method(
    item: pytest.Item, around: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Run a ``unittest.TestCase`` method inside `around`, between its setUp and its tearDown."""
    function = cast("pytest.Function", item)
    if _is_async(item):
        with _wrapped_async_method(function, around):
            yield
        return
    method = function.obj

    @functools.wraps(method)
    def measured(*args: object, **kwargs: object) -> object:
        with around():
            return method(*args, **kwargs)

    function.obj = measured
    try:
        yield
    finally:
        function.obj = method


def _is_async(item: pytest.Item) -> bool:
    return inspect.iscoroutinefunction(getattr(item, "obj", None))


@contextmanager
def _wrapped_async_method(
    function: pytest.Function, around: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Wrap a method that unittest, and not pytest, looks up by its name and awaits."""
    method = function.obj

    @functools.wraps(method)
    async def measured(*args: object, **kwargs: object) -> object:
        with around():
            return await method(*args, **kwargs)

    instance = function.instance
    setattr(instance, function.name, measured)
    try:
        yield
    finally:
        delattr(instance, function.name)


LABEL = "repeated runs"
"""The label of the region over all runs."""


def runs_of(item: pytest.Item) -> int:
    """Return how often the code of a test runs: once if it is not a plain function."""
    function = getattr(item, "obj", None)
    if function is None or inspect.iscoroutinefunction(function):
        return 1
    return item.config.stash[settings_key].repeat


def limit(runs: int) -> "FlatPerBatch":
    """Return the limit on growth over the runs: each is a batch, the first is the warm-up."""
    from pytest_cka_memory.limits import FlatPerBatch

    return FlatPerBatch(f"--cka-memory-repeat={runs}", 0, 1, unit="run")


@contextmanager
def repeated(item: pytest.Item, runs: int, ended: Callable[[int], None]) -> Iterator[None]:
    """Run the function of `item` several times when it is called in the block.

    The values of fixtures are the same in all runs. An exception ends the runs.

    Args:
        item: the test.
        runs: how often.
        ended: called with the number of a run, from 1, when it has ended.
    """
    if runs == 1:
        yield
        return
    function = cast("pytest.Function", item)
    method = function.obj

    @functools.wraps(method)
    def all_runs(*args: object, **kwargs: object) -> None:
        __tracebackhide__ = True
        for number in range(1, runs + 1):
            try:
                method(*args, **kwargs)
            except Exception:
                item.add_report_section("call", "cka-memory", f"run {number} of {runs} has failed")
                raise
            ended(number)

    function.obj = all_runs
    try:
        yield
    finally:
        function.obj = method


_LONGEST_NAME = 120


@contextmanager
def history_recorded(folder: Path | None, meter: Meter) -> Iterator[None]:
    """Record the allocator's history in the block, if there is a folder for snapshots of it."""
    if folder is not None:
        meter.record_history()
    try:
        yield
    finally:
        if folder is not None:
            meter.stop_history()


def write_snapshot(folder: Path, nodeid: str, meter: Meter) -> str:
    """Write the allocator's history of a test to a file in `folder`; return a line about it.

    It does not raise if the file cannot be written: a full disk must not hide why the test failed.
    """
    path = _path(folder, nodeid)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not meter.dump_history(path):
            return f"no memory snapshot: {meter.device} records no allocation history"
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"no memory snapshot: cannot write {path}: {error.strerror or error}"
    return f"{path}: open it in PyTorch's memory viewer"


def _path(folder: Path, nodeid: str) -> Path:
    # With a checksum, because two tests may differ only in characters that file names cannot have.
    checksum = crc32(nodeid.encode(errors="backslashreplace"))
    name = f"{re.sub(r'[^-.A-Za-z0-9]+', '_', nodeid)[-_LONGEST_NAME:]}-{checksum:08x}"
    rank = this_rank()
    return folder / (f"{name}-rank{rank.number}.pickle" if rank else f"{name}.pickle")


class ItemMeasurement:
    """Measures one test and judges its regions."""

    def __init__(self, item: pytest.Item) -> None:
        release = partial(kept_tracebacks.release_in_call, item)
        self.probe = MemoryProbe(
            meter=meter_of(item.config), explainer=self, also=self._also, before_reading=release
        )
        self.called = False
        """Whether the test's own code has been seen running."""
        self._item = item
        self._limits: tuple[Limit, ...] = ()
        """As of the start of the call; batch boundaries use these."""
        self._results: list[Result] = []
        self.properties: list[junit.Property] = []
        """What was added to the item's own, for JUnit XML and similar reports."""
        self._pending: list[dict[str, Any]] = []
        """The relations to tests that have not run yet, in builtin types."""
        self._judged = 0
        self._wrong: list[str] = []
        """What other plugins returned that cannot be reported."""
        self._returned = False
        """Whether the call has ended without an exception."""
        self._compared: list[tuple[str, RegionRecord]] = []
        """The figures that the failed test has compared itself, each with its region."""
        self._runs = runs_of(item)
        self._in_fixtures = 0
        """How many regions had ended before the call."""
        self._whole_region: Region | None = None
        """The region of the whole test, while it is open."""
        self._over_runs: list[RegionRecord] = []
        """The figures over all runs of a test that was repeated."""
        self._is_untouched = False
        """Whether the call has allocated nothing on the measured accelerator."""

    def repeated_call(self) -> AbstractContextManager[None]:
        """Return a context in which a call of the test runs it as often as the session asks for."""
        return repeated(self._item, self._runs, self._run_ended)

    def _run_ended(self, number: int) -> None:
        if self._whole_region is not None:
            self._whole_region.batch_done()
        if number < self._runs:  # the regions of the last run count
            self.probe.forget_from(self._in_fixtures)

    @contextmanager
    def measured_call(self) -> Iterator[None]:
        """Measure the test function as a whole, in case it opens no region, then judge."""
        self.called = True
        self._limits = limits_or_fail(self._item)
        self._in_fixtures = len(self.probe.records)
        whole = MemoryProbe(
            meter=self.probe.meter,
            explainer=self,
            is_thorough=self._is_whole_test_judged,
            also=self._also,
            before_reading=partial(kept_tracebacks.release_in_call, self._item),
        )
        snapshots = self._item.config.stash[settings_key].snapshots
        with history_recorded(snapshots, self.probe.meter):
            try:
                with whole.measure() as self._whole_region:
                    self._whole_region.label = ""  # that of the test is enough
                    yield
                self._returned = True
            except AssertionError as error:
                if were_compared(error):
                    self._compared = self.probe.explain_compared(error)
                raise
            finally:
                self._whole_region = None  # it references the meter's peaks
                if self._runs > 1:
                    self._over_runs = [replace(r, label=LABEL) for r in whole.records]
                if len(self.probe.records) == self._in_fixtures:
                    self.probe.records.extend(whole.records)
                if is_testcase(self._item) and keeps_failed_subtests(self._item):
                    self._complete_none(self._in_fixtures)
                untouched = (is_untouched(record, whole.meter) for record in whole.records)
                self._is_untouched = all(untouched)
                results = self._collect()
                failed = not self._returned or any(result.breaches for result in results)
                if failed and snapshots is not None:
                    line = write_snapshot(snapshots, self._item.nodeid, self.probe.meter)
                    self._item.add_report_section("call", "cka-memory", line)
        self._fail_on_breach(results)

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        """Return the figures to explain: those too high and, on request, what is retained."""
        explain = self._item.config.stash[settings_key].explain
        limits: Sequence[Limit] = self._limits
        if self._whole_region is not None and record.label == self._whole_region.label:
            limits = [*limits, *self._limits_over_runs()]
            if len(self.probe.records) > self._in_fixtures:  # only these are reported
                explain, limits = False, self._limits_over_runs()
        figures = {"retained_bytes", "peak_bytes"} if explain else set()
        if limits:
            breaches = judge(self._item.nodeid, record, limits).breaches
            figures.update(b.figure for b in breaches if b.measured_bytes is not None)
        if any(limit.reports_host for limit in self._limits):
            figures.add(GROWTH_ON_HOST)
        return figures

    def _is_whole_test_judged(self) -> bool:
        """Whether the figures of the whole test are more than a row in the report."""
        settings = self._item.config.stash[settings_key]
        is_exact = settings.explain or settings.baseline.updating or settings.also
        return bool(is_exact or self._runs > 1 or plan_of(self._item).limits)

    def _limits_over_runs(self) -> Sequence[Limit]:
        warns = self._item.config.stash[settings_key].only_warns
        return [replace(limit(self._runs), warns=warns)] if self._runs > 1 else []

    def _also(self) -> Collection[str]:
        """Return what the regions of this test measure in addition."""
        of_limits = {limit.addition for limit in plan_of(self._item).limits} - {""}
        settings = self._item.config.stash[settings_key]
        drawn = [TIMELINE] if settings.draws(self._item.nodeid) else []
        return of_limits.union(settings.also, drawn, item_limits.additions_for_others(self._item))

    def named_values(self) -> Mapping[str, Any]:
        """Return the test's fixtures by name, and ``self`` if it is a method."""
        instance = getattr(self._item, "instance", None)
        own = {} if instance is None else {"self": instance}
        return {**own, **getattr(self._item, "funcargs", {})}

    def notify(self, line: str) -> None:
        """Write a line to standard error, which pytest captures otherwise."""
        from pytest_cka_memory.holders.survivors import to_stderr

        with without_capture(self._item.config):
            to_stderr(line)

    @property
    def draws_paths(self) -> bool:
        """Whether the session asks for a picture of the references to what is retained."""
        return self._item.config.stash[settings_key].draws_paths

    def judge_late_regions(self) -> None:
        """Judge regions that ended after the call, in the teardown of a fixture."""
        if not self._returned:  # the traceback references what was allocated in them
            self._complete_none(self._judged)
        left_open = self.probe.end_open()
        self._fail_on_breach(self._collect())
        if left_open and self._returned:
            fail(never_closed(left_open))

    def _complete_none(self, first: int) -> None:
        """Mark the regions from the number `first` on as not completed, so that none is judged."""
        found = self.probe.records[first:]
        self.probe.records[first:] = [replace(record, completed=False) for record in found]

    def judge_without_limits(self) -> None:
        """Report a test that requested the fixture only while it ran, when it had no limits."""
        self.called = self._returned = True
        self._fail_on_breach(self._collect())

    def take_payload(self, report: pytest.TestReport) -> Payload | None:
        """Return what travels on the report of a phase; None if there is nothing new."""
        results, self._results = self._results, []
        unseen = report.when == "call" and report.passed and not self.called
        unmeasured = [unseen_reason(self._item)] if unseen else []
        if not results and not unmeasured:
            return None
        return {
            "facts": self.probe.meter.facts(),
            "regions": [result.to_dict() for result in results],
            "unmeasured": unmeasured,
            "narrowed": is_narrowed(self._item.config),
            **self._take_pending(),
        }

    def _take_pending(self) -> Mapping[str, Any]:
        pending, self._pending = self._pending, []
        return {"relations": pending} if pending else {}

    def add_compared_figures(self, report: pytest.TestReport) -> None:
        """Add to the text of a failed test what explains the figures that it has compared."""
        compared, self._compared = self._compared, []
        add_section = getattr(report.longrepr, "addsection", None)
        if compared and add_section is not None:
            from pytest_cka_memory.reports import failure

            lines = failure.compared(compared, self.probe.meter.facts(), self._width)
            add_section("cka-memory", "\n".join(lines))

    @property
    def _width(self) -> int:
        """Characters of a line in the text of a failure."""
        from pytest_cka_memory.reports import failure

        return min(failure.WIDTH, terminal_width(self._item.config))

    def _collect(self) -> list[Result]:
        limits = limits_or_fail(self._item)
        records: list[RegionRecord] = self.probe.records[self._judged :]
        item_limits.note(self._item, records, self.probe.meter.facts())
        self._pending += item_limits.pending(limits, records)
        judged = [judge(self._item.nodeid, record, limits) for record in records]
        over_runs, self._over_runs = self._over_runs, []
        judged += [judge(self._item.nodeid, it, self._limits_over_runs()) for it in over_runs]
        if self._is_untouched and all(is_untouched(r, self.probe.meter) for r in records):
            judged = without_kept_limits(self._item, judged, self.probe.meter)
        results = [self._extended(result) for result in judged]
        self._judged = len(self.probe.records)
        self._results += results
        facts, root = self.probe.meter.facts(), self._item.config.rootpath
        figures = junit.of_results(results, facts, root)
        figures += [(junit.LARGEST, size) for size in self.probe.largest_sizes]
        self.probe.largest_sizes.clear()
        self.properties += figures
        self._item.user_properties += figures
        return results

    def _extended(self, result: Result) -> Result:
        if not self._item.ihook.pytest_cka_memory_region.get_hookimpls():
            return result
        from pytest_cka_memory.plugin import item_limits

        try:
            fields = item_limits.fields_of(self._item, result)
            return replace(result, extra=fields) if fields else result
        except item_limits.FieldError as error:
            if self._returned:  # otherwise the test has failed for its own reason
                self._wrong.append(str(error))
            return result

    def _fail_on_breach(self, results: Sequence[Result]) -> None:
        messages: list[str] = []
        headline = ""
        if any(result.breaches for result in results):
            from pytest_cka_memory.reports import failure

            facts = self.probe.meter.facts()
            messages += filter(None, [failure.render(results, facts, self._width)])
            headline = failure.headline(results)
            warning = failure.render(results, facts, self._width, warns=True)
            if warning:
                self._item.warn(LimitWarning(warning))
        unused = [context.mistake for context in self.probe.unused] if self._returned else []
        self.probe.unused.clear()
        messages, self._wrong = [*messages, *self._wrong, *unused], []
        if messages:
            fail("\n".join(messages), headline)


measurement_key = pytest.StashKey[ItemMeasurement]()
_properties_key = pytest.StashKey[list[junit.Property]]()
"""What the run that ended last has added to the properties of its test."""


def begin(item: pytest.Item) -> None:
    """Drop the measurement of an earlier run of `item`, and check its limits again."""
    forget(item)  # of one without a teardown
    if _properties_key in item.stash:  # a plugin such as pytest-rerunfailures runs it again
        properties = item.stash[_properties_key]
        ours = set(map(id, properties))
        item.user_properties[:] = [p for p in item.user_properties if id(p) not in ours]
        del item.stash[_properties_key]
    limits_or_fail(item)


def forget(item: pytest.Item) -> None:
    """Drop the measurement of a run that has ended; its reports have its figures.

    pytest keeps all items until the session ends, and what they keep is looked at by each full
    garbage collection.
    """
    if measurement_key in item.stash:
        if properties := item.stash[measurement_key].properties:
            item.stash[_properties_key] = properties
        del item.stash[measurement_key]


def measurement_of(item: pytest.Item) -> ItemMeasurement | None:
    """Return the measurement of `item`, made on first use; None for a test that is not measured."""
    if measurement_key not in item.stash and plan_of(item).is_measured:
        item.stash[measurement_key] = ItemMeasurement(item)
    return item.stash.get(measurement_key, None)


def measurement_for_fixture(item: pytest.Item) -> ItemMeasurement:
    """Return the measurement of `item`, also if it requests the fixture only while it runs."""
    measurement = measurement_of(item)
    if measurement is None:
        measurement = item.stash[measurement_key] = ItemMeasurement(item)
    return measurement


@contextmanager
def unmeasured_call(item: pytest.Item) -> Iterator[None]:
    """Run a test that is not measured, then call :func:`end_unmeasured`."""
    yield
    end_unmeasured(item)


def end_unmeasured(item: pytest.Item) -> None:
    """Fail a test that got a marker while it ran; judge one that requested the fixture then."""
    limits = limits_or_fail(item)
    if limits:
        fail(
            f"{', '.join(limit.text for limit in limits)}: not checked, because the test was "
            "already running when this marker was added; add it in a fixture, or write it on the "
            "test",
        )
    if measurement_key in item.stash:
        item.stash[measurement_key].judge_without_limits()


def refuse_unseen(item: pytest.Item, measurement: ItemMeasurement) -> None:
    """Fail a test whose own limits were never checked, because silence would look like a pass.

    The limits of the session's options do not fail it: the report counts it as not measured.
    """
    plan = plan_of(item)
    if plan.error is not None:
        limits_or_fail(item)
    if plan.own_limits and not measurement.called:
        reason = unseen_reason(item)
        fail(
            f"{', '.join(limit.text for limit in plan.own_limits)}: not checked. "
            f"{reason[0].upper()}{reason[1:]}; write it as a plain or async test function, or "
            "remove the marker",
        )
