"""The measurement of one test: its regions are opened and closed here, and put on its report."""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import pytest

from pytest_cka_memory.core.figure_rows import TIMELINE
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.report import Payload
from pytest_cka_memory.measure.probe import MemoryProbe
from pytest_cka_memory.measure.region import Region
from pytest_cka_memory.measure.region_context import never_closed
from pytest_cka_memory.plugin import kept_tracebacks
from pytest_cka_memory.plugin.device import meter_of
from pytest_cka_memory.plugin.judging import (
    CallOutcome,
    ItemExplainer,
    Judgement,
    WholeTestExplainer,
    fail_on_breach,
    failure_width,
    is_untouched,
    judge_regions,
    limits_over_runs,
    were_compared,
)
from pytest_cka_memory.plugin.options import is_narrowed
from pytest_cka_memory.plugin.plan import compared_key, plan_of
from pytest_cka_memory.plugin.pytest_private import fail
from pytest_cka_memory.plugin.settings import settings_key
from pytest_cka_memory.plugin.snapshot_files import SnapshotFiles
from pytest_cka_memory.reports import junit

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


def _end_run(region: Region, probe: MemoryProbe, in_fixtures: int, runs: int, number: int) -> None:
    """Note that the run `number` of a test has ended, whose whole is measured by `region`."""
    region.batch_done()
    if number < runs:  # the regions of the last run count
        probe.forget_from(in_fixtures)


def _nothing(number: int) -> None:
    """Take no note of a run: the test is not measured as a whole."""


class ItemMeasurement:
    """Opens and closes the regions of one test; :mod:`.judging` judges them."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._explainer = ItemExplainer(item)
        self.probe = MemoryProbe(
            meter=meter_of(item.config),
            explainer=self._explainer,
            also=self._also,
            before_reading=partial(kept_tracebacks.release_in_call, item),
        )
        self.files = SnapshotFiles(item, self.probe.meter)
        self.call = CallOutcome()
        self.properties: list[junit.Property] = []
        """What was added to the item's own, for JUnit XML and similar reports."""
        # Known now, because pytest-asyncio replaces the function of a coroutine before its call.
        self._runs = runs_of(item)
        self._judged = 0
        """How many of the probe's regions were judged."""
        self._unreported: list[Judgement] = []
        """Those that no report has taken along yet."""
        self._run_ended: Callable[[int], None] = _nothing
        """Called while the test is measured, with the number of a run that has ended."""

    def repeated_call(self) -> AbstractContextManager[None]:
        """Return a context in which a call of the test runs it as often as the session asks for."""
        return repeated(self._item, self._runs, lambda number: self._run_ended(number))

    @contextmanager
    def measured_call(self) -> Iterator[None]:
        """Measure the test function as a whole, in case it opens no region, then judge."""
        item, probe, runs = self._item, self.probe, self._runs
        settings = item.config.stash[settings_key]
        self.call = CallOutcome(has_begun=True)
        limits = self._explainer.limits = plan_of(item).usable_limits()
        in_fixtures = len(probe.records)
        over_runs = limits_over_runs(settings) if runs > 1 else ()
        explainer = WholeTestExplainer(
            item, limits, over_runs, has_regions=lambda: len(probe.records) > in_fixtures
        )
        whole = MemoryProbe(
            meter=probe.meter,
            explainer=explainer,
            is_thorough=self._is_whole_test_judged,
            also=self._also,
            before_reading=partial(kept_tracebacks.release_in_call, item),
        )
        region: Region | None = None
        returned = False
        compared: Sequence[tuple[str, RegionRecord]] = ()
        with self.files.written():
            try:
                with whole.measure() as region:
                    region.label = ""  # that of the test is enough
                    self._run_ended = partial(_end_run, region, probe, in_fixtures, runs)
                    yield
                returned = True
            except AssertionError as error:
                if were_compared(error):
                    compared = probe.explain_compared(error)
                raise
            finally:
                region, self._run_ended = None, _nothing  # it references the meter's peaks
                if len(probe.records) == in_fixtures:
                    probe.records.extend(whole.records)
                if is_testcase(item) and keeps_failed_subtests(item):
                    self._complete_none(in_fixtures)
                untouched = all(is_untouched(record, whole.meter) for record in whole.records)
                self.call = CallOutcome(True, returned, untouched, compared)
                of_runs = whole.records if runs > 1 else ()
                judgement = self._judge([replace(record, label=LABEL) for record in of_runs])
                failed = not returned or judgement.is_broken
                if line := self.files.end(None if returned else sys.exc_info()[1], failed=failed):
                    item.add_report_section("call", "cka-memory", line)
        self._fail_on_breach(judgement)

    def judge_late_regions(self) -> None:
        """Judge regions that ended after the call, in the teardown of a fixture."""
        if not self.call.returned:  # the traceback references what was allocated in them
            self._complete_none(self._judged)
        left_open = self.probe.end_open()
        self._fail_on_breach(self._judge())
        if left_open and self.call.returned:
            fail(never_closed(left_open))

    def judge_without_limits(self) -> None:
        """Report a test that requested the fixture only while it ran, when it had no limits."""
        self.call = CallOutcome(has_begun=True, returned=True)
        self._fail_on_breach(self._judge())

    def take_payload(self, report: pytest.TestReport) -> Payload | None:
        """Return what travels on the report of a phase; None if there is nothing new."""
        judgements, self._unreported = self._unreported, []
        results = [result for judgement in judgements for result in judgement.results]
        relations = [it for judgement in judgements for it in judgement.relations]
        unseen = report.when == "call" and report.passed and not self.call.has_begun
        unmeasured = [unseen_reason(self._item)] if unseen else []
        if not results and not unmeasured:
            return None
        payload: Payload = {
            "facts": self.probe.meter.facts(),
            "regions": [result.to_dict() for result in results],
            "unmeasured": unmeasured,
            "narrowed": is_narrowed(self._item.config),
        }
        if relations:
            payload["relations"] = relations
        return payload

    def add_explanations(self, report: pytest.TestReport) -> None:
        """Add to the text of a failed test what explains the figures that it has compared, or what
        the device had in use when it ran out of memory.
        """
        compared = self.call.compared
        refused = [record for record in self.probe.records if record.refusal is not None]
        add_section = getattr(report.longrepr, "addsection", None)
        if not (compared or refused) or add_section is None:
            return
        self.call = replace(self.call, compared=())
        from pytest_cka_memory.reports import failure

        facts, width = self.probe.meter.facts(), failure_width(self._item.config)
        lines = [*failure.compared(compared, facts, width)]
        if refused and report.when == "call":  # the innermost region ends first
            lines += failure.out_of_memory(refused[0], facts, width)
        if lines:
            add_section("cka-memory", "\n".join(lines))

    def _is_whole_test_judged(self) -> bool:
        """Whether the figures of the whole test are more than a row in the report."""
        settings = self._item.config.stash[settings_key]
        is_exact = settings.explain or settings.baseline.updating or settings.also
        return bool(is_exact or self._runs > 1 or plan_of(self._item).limits)

    def _also(self) -> Collection[str]:
        """Return what the regions of this test measure in addition."""
        of_limits = {limit.addition for limit in plan_of(self._item).limits} - {""}
        settings = self._item.config.stash[settings_key]
        drawn = [TIMELINE] if settings.draws(self._item.nodeid) else []
        compared = self._item.config.stash.get(compared_key, {}).get(self._item.nodeid)
        for_others = compared.additions if compared is not None else ()
        return of_limits.union(settings.also, drawn, for_others)

    def _complete_none(self, first: int) -> None:
        """Mark the regions from the number `first` on as not completed, so that none is judged."""
        ended = self.probe.records[first:]
        self.probe.records[first:] = [replace(record, completed=False) for record in ended]

    def _judge(self, over_runs: Sequence[RegionRecord] = ()) -> Judgement:
        """Judge the regions that have ended since the last time, and note what reports get."""
        item, probe = self._item, self.probe
        records, self._judged = probe.records[self._judged :], len(probe.records)
        judgement = judge_regions(item, plan_of(item), records, over_runs, self.call, probe.meter)
        self._unreported.append(judgement)
        figures = junit.of_results(judgement.results, probe.meter.facts(), item.config.rootpath)
        figures += [(junit.LARGEST, size) for size in probe.largest_sizes]
        probe.largest_sizes.clear()
        self.properties += figures
        item.user_properties += figures
        return judgement

    def _fail_on_breach(self, judgement: Judgement) -> None:
        unused = [context.mistake for context in self.probe.unused] if self.call.returned else []
        self.probe.unused.clear()
        fail_on_breach(self._item, judgement, self.probe.meter, unused)


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
    plan_of(item).usable_limits()


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
def around_call(item: pytest.Item) -> Iterator[None]:
    """Measure a method of a ``unittest.TestCase``; see that others were measured.

    Other functions are measured by :func:`around_function`, closer to their code.
    """
    measurement = measurement_of(item)
    if measurement is None:
        yield
    elif is_testcase(item):
        with measurement.repeated_call(), wrapped_method(item, measurement.measured_call):
            yield
    else:
        yield
        _refuse_unseen(item, measurement)


@contextmanager
def around_function(item: pytest.Function) -> Iterator[None]:
    """Measure the function of a test, if it is measured."""
    measurement = measurement_of(item)
    if measurement is None:
        yield
        end_unmeasured(item)
    else:
        with measurement.repeated_call(), measurement.measured_call():
            yield


def end_unmeasured(item: pytest.Item) -> None:
    """Fail a test that got a marker while it ran; judge one that requested the fixture then."""
    limits = plan_of(item).usable_limits()
    if limits:
        fail(
            f"{', '.join(limit.text for limit in limits)}: not checked, because the test was "
            "already running when this marker was added; add it in a fixture, or write it on the "
            "test",
        )
    if measurement_key in item.stash:
        item.stash[measurement_key].judge_without_limits()


def _refuse_unseen(item: pytest.Item, measurement: ItemMeasurement) -> None:
    """Fail a test whose own limits were never checked, because silence would look like a pass.

    The limits of the session's options do not fail it: the report counts it as not measured.
    """
    if measurement.call.has_begun:  # then it was judged
        return
    plan = plan_of(item)
    plan.usable_limits()
    if plan.own_limits:
        reason = unseen_reason(item)
        fail(
            f"{', '.join(limit.text for limit in plan.own_limits)}: not checked. "
            f"{reason[0].upper()}{reason[1:]}; write it as a plain or async test function, or "
            "remove the marker",
        )
