"""One test item: whether it is measured, by which limits, and what came of it."""

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest import TestCase
from zlib import crc32

import pytest

from pytest_cka_memory.baseline import limit as baseline_limit
from pytest_cka_memory.baseline.update import fingerprint_of
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.markers import FIXTURE
from pytest_cka_memory.core.report import Payload, facts_of
from pytest_cka_memory.core.verdicts import Result, judge
from pytest_cka_memory.errors import BaselineError, DeviceError, LimitError
from pytest_cka_memory.integrations.torchrun import this_rank
from pytest_cka_memory.limits import MARKERS, Limit, default_limits, limit_from_marker
from pytest_cka_memory.measure.probe import MemoryProbe
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.plugin import extensions, options
from pytest_cka_memory.plugin.settings import Settings
from pytest_cka_memory.reports import failure, junit

settings_key = pytest.StashKey[Settings]()
meter_key = pytest.StashKey[Meter]()
measurement_key = pytest.StashKey["ItemMeasurement"]()


def limits_of(item: pytest.Item) -> list[Limit]:
    """Limits of one test: its closest markers, else those of the session.

    Raises:
        LimitError: for a marker with arguments it cannot have.
        BaselineError: for a baseline file that cannot be used.
    """
    own = own_limits_of(item)
    settings = item.config.stash[settings_key]
    limits = own + default_limits(own, settings.max_retained_bytes, settings.max_peak_bytes)
    if settings.baseline.named and not _is_marked(item, baseline_limit.MARKER):
        limits += _baseline_of(item) if is_measured(item) else []
    return limits


def own_limits_of(item: pytest.Item) -> list[Limit]:
    """Limits of the test's own markers and of other plugins; raises as :func:`limits_of`."""
    markers = [marker for name in MARKERS if (marker := _closest(item, name)) is not None]
    limits = [limit_from_marker(marker.name, marker.args, marker.kwargs) for marker in markers]
    limits += extensions.limits_of(item)
    return limits + (_baseline_of(item) if _is_marked(item, baseline_limit.MARKER) else [])


def _is_marked(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


def _baseline_of(item: pytest.Item) -> list[Limit]:
    """What the test's baseline allows on this device; nothing while it is written anew."""
    plan = item.config.stash[settings_key].baseline
    text, tolerance = "--cka-memory-baseline", plan.tolerance
    marker = _closest(item, baseline_limit.MARKER)
    if marker is not None:
        tolerance = baseline_limit.tolerance_of(marker.args, marker.kwargs, tolerance)
        given = marker.args or marker.kwargs
        text = f"{marker.name}({tolerance.text!r})" if given else marker.name
    if plan.updating:
        return []
    meter = item.config.stash.get(meter_key, None)  # none before the first test that is measured
    device = None if meter is None else fingerprint_of(facts_of(meter))
    return [plan.limit(text, item.nodeid, device, tolerance)]


def _closest(item: pytest.Item, name: str) -> pytest.Mark | None:
    """The last marker of the nearest node that has any.

    Not ``get_closest_marker``, which takes the first: there a function goes before its
    ``pytest.param``, a base class before its subclass, and a written marker before one applied.
    """
    found = list(item.iter_markers_with_node(name))
    return next((mark for node, mark in reversed(found) if node is found[0][0]), None)


def is_measured(item: pytest.Item) -> bool:
    """Whether to measure `item`: it is marked, uses the fixture, or every test is measured."""
    return (
        item.config.stash[settings_key].measures_all
        or FIXTURE in getattr(item, "fixturenames", ())
        or any(_is_marked(item, name) for name in (*MARKERS, baseline_limit.MARKER))
        or item.config.stash[settings_key].baseline.measures(item.nodeid)
        or extensions.gives_limits(item)
    )


def is_narrowed(config: pytest.Config) -> bool:
    """Whether tests may have been left out of a file that was collected."""
    return (
        config.stash.get(options.narrowed_key, False)
        or any("::" in arg for arg in config.args)
        or bool(config.getoption("lf", False))  # which leaves out without a word
    )


def check(items: Sequence[pytest.Item]) -> None:
    """Read every marker once, before any test runs.

    Raises:
        pytest.UsageError: for wrong marker arguments; it names the tests. For a baseline file that
            cannot be used, where no report of this process has said so before.
    """
    wrong = []
    for item in items:
        try:
            if is_measured(item):
                limits_of(item)
        except LimitError as error:
            wrong.append(f"{item.nodeid}: {error}")
        except BaselineError as error:
            raise pytest.UsageError(f"--cka-memory-baseline: {error}") from None
    if wrong:
        raise pytest.UsageError(*wrong)


def meter_of(config: pytest.Config) -> Meter:
    """Return the session's meter, made when first asked for: here torch is imported.

    Raises:
        pytest.UsageError: for a device that is not there.
    """
    if meter_key not in config.stash:
        device = config.stash[settings_key].device
        try:
            config.stash[meter_key] = config.hook.pytest_cka_memory_meter(
                config=config, device=device
            )
        except DeviceError as error:
            raise pytest.UsageError(f"--cka-memory-device: {error}") from None
    return config.stash[meter_key]


def begin(item: pytest.Item) -> None:
    """Forget an earlier run of `item`, and check its markers once more.

    A serial run has refused wrong ones before; an xdist worker cannot refuse to start.
    """
    if measurement_key in item.stash:  # a plugin runs this test again
        item.stash[measurement_key].take_back_properties()
        del item.stash[measurement_key]
    limits_or_fail(item)


def limits_or_fail(item: pytest.Item) -> list[Limit]:
    """As :func:`limits_of`, where it is too late to refuse to run: a wrong marker fails."""
    try:
        return limits_of(item)
    except (LimitError, BaselineError) as error:
        wrong = f"{item.nodeid}: {error}"
    # Outside the except block, or pytest would print both errors.
    pytest.fail(wrong, pytrace=False)


def need_meter(item: pytest.Item) -> None:
    """Make the meter for a test that will be measured; without its device the test is in error."""
    if not is_measured(item):
        return
    try:
        meter_of(item.config)
        return
    except pytest.UsageError as error:
        wrong = f"{item.nodeid}: {error}"
    pytest.fail(wrong, pytrace=False)


class ItemMeasurement:
    """The measuring of one test."""

    def __init__(self, item: pytest.Item) -> None:
        self.probe = MemoryProbe(meter=meter_of(item.config), explainer=self)
        self.called = False
        """Whether the test's own code has been seen running."""
        self._item = item
        self._results: list[Result] = []
        self._properties: list[junit.Property] = []
        """What was added to the item's, for JUnit XML and its like."""
        self._judged = 0
        self._wrong: list[str] = []
        """What other plugins returned that cannot be reported."""
        self._snapshots = item.config.stash[settings_key].snapshots
        self._returned = False
        """Whether the call has ended without an exception."""

    @contextmanager
    def measured_call(self) -> Iterator[None]:
        """Measure the test function as a whole, for it may open no region, then judge."""
        self.called = True
        in_fixtures = len(self.probe.records)
        whole = MemoryProbe(meter=self.probe.meter, explainer=self)
        if self._snapshots is not None:
            self.probe.meter.record_history()
        try:
            with whole.measure():
                yield
            self._returned = True
        finally:
            if len(self.probe.records) == in_fixtures:
                self.probe.records.extend(replace(r, label="") for r in whole.records)
            results = self._collect()
            if not self._returned or any(result.breaches for result in results):
                self._dump_snapshot()
        self._fail_on_breach(results)

    def _dump_snapshot(self) -> None:
        """Write the allocator's history of a failed test, and say where."""
        if self._snapshots is None:
            return
        # A checksum, for two names may differ only in what a file name cannot hold.
        nodeid = self._item.nodeid
        checksum = crc32(nodeid.encode(errors="backslashreplace"))
        name = f"{re.sub(r'[^-.A-Za-z0-9]+', '_', nodeid)[-120:]}-{checksum:08x}"
        rank = this_rank()
        path = self._snapshots / (f"{name}-rank{rank.number}.pickle" if rank else f"{name}.pickle")
        said = f"{path}: open it in PyTorch's memory viewer"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self.probe.meter.dump_history(path):
                said = f"no memory snapshot: {self.probe.meter.device} keeps no history"
        except OSError as error:  # a full disk must not hide why the test failed
            path.unlink(missing_ok=True)
            said = f"no memory snapshot: cannot write {path}: {error.strerror or error}"
        self._item.add_report_section("call", "cka-memory", said)

    def wanted(self, record: RegionRecord) -> Collection[str]:
        """Figures to explain: those that break a limit, or with the option what is retained."""
        breaches = judge(self._item.nodeid, record, limits_or_fail(self._item)).breaches
        explain = self._item.config.stash[settings_key].explain
        broken = {breach.figure for breach in breaches if breach.measured_bytes is not None}
        return broken | ({"retained_bytes"} if explain else set())

    def named(self) -> Mapping[str, Any]:
        """The test's fixtures, and ``self`` where it is a method."""
        instance = getattr(self._item, "instance", None)
        own = {} if instance is None else {"self": instance}
        return {**own, **getattr(self._item, "funcargs", {})}

    def judge_late_regions(self) -> None:
        """Judge regions that ended after the call, in a fixture's teardown."""
        if not self._returned:  # a traceback holds what they saw being born
            late = self.probe.records[self._judged :]
            self.probe.records[self._judged :] = [replace(r, completed=False) for r in late]
        left_open = self.probe.end_open()
        self._fail_on_breach(self._collect())
        if left_open and self._returned:
            pytest.fail(
                f"never ended: region {', '.join(map(repr, left_open))}, so nothing of it was "
                "judged; open it in a 'with' block",
                pytrace=False,
            )

    def join_late(self) -> None:
        """Take in a call that asked for its probe only while it ran, and so has no limits."""
        self.called = self._returned = True
        self._fail_on_breach(self._collect())

    def take_payload(self, report: pytest.TestReport) -> Payload | None:
        """Hand over what is to ride on the report of a phase; None where that is nothing new."""
        results, self._results = self._results, []
        unseen = report.when == "call" and report.passed and not self.called
        unmeasured = [unseen_reason(self._item)] if unseen else []
        if not results and not unmeasured:
            return None
        return {
            "facts": facts_of(self.probe.meter),
            "regions": [result.to_dict() for result in results],
            "unmeasured": unmeasured,
            "narrowed": is_narrowed(self._item.config),
        }

    def take_back_properties(self) -> None:
        """Take the figures of a run that does not count off the item."""
        ours = set(map(id, self._properties))
        self._item.user_properties[:] = [p for p in self._item.user_properties if id(p) not in ours]

    def _collect(self) -> list[Result]:
        limits = limits_or_fail(self._item)
        records: list[RegionRecord] = self.probe.records[self._judged :]
        results = [self._extended(judge(self._item.nodeid, r, limits)) for r in records]
        self._judged = len(self.probe.records)
        self._results += results
        self._properties += (figures := junit.of_results(results))
        self._item.user_properties += figures
        return results

    def _extended(self, result: Result) -> Result:
        try:
            return replace(result, extra=extensions.fields_of(self._item, result))
        except extensions.FieldError as error:
            if self._returned:  # else the test has failed, by itself
                self._wrong.append(str(error))
            return result

    def _fail_on_breach(self, results: Sequence[Result]) -> None:
        broken = any(result.breaches for result in results)
        told = [failure.text(results, self.probe.meter)] if broken else []
        told, self._wrong = [*told, *self._wrong], []
        if told:
            pytest.fail("\n".join(told), pytrace=False)


def measurement_of(item: pytest.Item) -> ItemMeasurement | None:
    """Return the job of `item`, made on first use; None for a test that is not measured."""
    if measurement_key not in item.stash and is_measured(item):
        item.stash[measurement_key] = ItemMeasurement(item)
    return item.stash.get(measurement_key, None)


def measurement_for_fixture(item: pytest.Item) -> ItemMeasurement:
    """As :func:`measurement_of`, for a test that may ask for the fixture only while it runs."""
    job = measurement_of(item)
    if job is None:
        job = item.stash[measurement_key] = ItemMeasurement(item)
    return job


@contextmanager
def unmeasured_call(item: pytest.Item) -> Iterator[None]:
    """Let a test run that is not measured, unless it asks for that while it runs."""
    yield
    end_unmeasured(item)


def end_unmeasured(item: pytest.Item) -> None:
    """Fail a test that was marked while it ran; take in one that asked for its probe only then."""
    limits = limits_or_fail(item)
    if limits:
        pytest.fail(
            f"{', '.join(limit.text for limit in limits)}: not checked, the test already ran when "
            "this marker was added; add it in a fixture, or write it on the test",
            pytrace=False,
        )
    if measurement_key in item.stash:
        item.stash[measurement_key].join_late()


def unseen_reason(item: pytest.Item) -> str:
    """Why the code of an item cannot be seen running."""
    return f"{type(item).__name__} items run their code where it cannot be measured"


def refuse_unseen(item: pytest.Item, job: ItemMeasurement) -> None:
    """Fail a test whose own limits were never checked: silence would look like a pass.

    The session's limits are not the test's to fail by: the report counts it as not measured.
    """
    limits = own_limits_of(item)
    if limits and not job.called:
        pytest.fail(
            f"{', '.join(limit.text for limit in limits)}: not checked. {unseen_reason(item)}; "
            "write it as a plain or async test function, or take the marker off",
            pytrace=False,
        )


@contextmanager
def measured_method(item: pytest.Item, job: ItemMeasurement) -> Iterator[None]:
    """Measure a ``unittest.TestCase`` method, between its setUp and its tearDown."""
    function = cast("pytest.Function", item)
    method = function.obj

    @functools.wraps(method)
    def measured(*args: object, **kwargs: object) -> object:
        with job.measured_call():
            return method(*args, **kwargs)

    function.obj = measured
    try:
        yield
    finally:
        function.obj = method


def is_sync_testcase(item: pytest.Item) -> bool:
    """Whether `item` is a plain method of a ``unittest.TestCase``, which pytest calls itself."""
    import inspect

    cls = getattr(item, "cls", None)
    if cls is None or not issubclass(cls, TestCase):
        return False
    return not inspect.iscoroutinefunction(getattr(item, "obj", None))
