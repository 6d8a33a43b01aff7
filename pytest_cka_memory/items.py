"""One test item: whether it is measured, by which limits, and what came of it."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast
from unittest import TestCase

import pytest

from pytest_cka_memory.errors import DeviceError, LimitError
from pytest_cka_memory.limits import MARKERS, Limit, default_limits, limit_from_marker
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.probe import MemoryProbe
from pytest_cka_memory.region import RegionRecord
from pytest_cka_memory.reports import failure
from pytest_cka_memory.results import Result, judge
from pytest_cka_memory.session import Payload, facts_of
from pytest_cka_memory.settings import Settings

FIXTURE = "cka_memory"

settings_key = pytest.StashKey[Settings]()
meter_key = pytest.StashKey[Meter]()
job_key = pytest.StashKey["Job"]()


def limits_of(item: pytest.Item) -> list[Limit]:
    """Limits of one test: its closest markers, else those of the session.

    Raises:
        LimitError: for a marker with arguments it cannot have.
    """
    markers = [marker for name in MARKERS if (marker := item.get_closest_marker(name)) is not None]
    own = [limit_from_marker(marker.name, marker.args, marker.kwargs) for marker in markers]
    settings = item.config.stash[settings_key]
    return own + default_limits(own, settings.max_retained_bytes, settings.max_peak_bytes)


def is_measured(item: pytest.Item) -> bool:
    """Whether to measure `item`: it is marked, uses the fixture, or every test is measured."""
    return (
        item.config.stash[settings_key].measures_all
        or FIXTURE in getattr(item, "fixturenames", ())
        or any(item.get_closest_marker(name) is not None for name in MARKERS)
    )


def check(items: Sequence[pytest.Item]) -> None:
    """Read every marker once, before any test runs.

    Raises:
        pytest.UsageError: for wrong marker arguments; it names the tests.
    """
    wrong = []
    for item in filter(is_measured, items):
        try:
            limits_of(item)
        except LimitError as error:
            wrong.append(f"{item.nodeid}: {error}")
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


def prepare(item: pytest.Item) -> None:
    """Get all ready that `item` needs to be measured; where that fails, the test is in error.

    A serial run has checked markers and device before; an xdist worker cannot refuse to start.
    """
    if not is_measured(item):
        return
    wrong = None
    try:
        limits_of(item)
        meter_of(item.config)
    except (LimitError, pytest.UsageError) as error:
        wrong = f"{item.nodeid}: {error}"
    if wrong is not None:  # outside the except block, or pytest would print both errors
        pytest.fail(wrong, pytrace=False)


class Job:
    """The measuring of one test."""

    def __init__(self, item: pytest.Item) -> None:
        self.probe = MemoryProbe(meter=meter_of(item.config))
        self.called = False
        """Whether the test's own code has been seen running."""
        self._item = item
        self._results: list[Result] = []
        self._judged = 0

    @contextmanager
    def measured_call(self) -> Iterator[None]:
        """Measure the test function as a whole, for it may open no region, then judge."""
        self.called = True
        whole = MemoryProbe(meter=self.probe.meter)
        try:
            with whole.measure():
                yield
        finally:
            if not self.probe.records:
                self.probe.records.extend(replace(r, label="") for r in whole.records)
            results = self._collect()
        self._fail_on_breach(results)

    def judge_late_regions(self) -> None:
        """Judge regions that ended after the call, in a fixture's teardown."""
        self._fail_on_breach(self._collect())

    def take_payload(self, when: str) -> Payload | None:
        """Hand over what is to ride on the report of a phase; None where that is nothing new."""
        results, self._results = self._results, []
        unseen = when == "call" and not self.called
        unmeasured = [unseen_reason(self._item)] if unseen else []
        if not results and not unmeasured:
            return None
        return {
            "facts": facts_of(self.probe.meter),
            "regions": [result.to_dict() for result in results],
            "unmeasured": unmeasured,
        }

    def _collect(self) -> list[Result]:
        limits = limits_of(self._item)
        records: list[RegionRecord] = self.probe.records[self._judged :]
        results = [judge(self._item.nodeid, record, limits) for record in records]
        self._judged = len(self.probe.records)
        self._results += results
        return results

    def _fail_on_breach(self, results: Sequence[Result]) -> None:
        if any(result.breaches for result in results):
            pytest.fail(failure.text(results, self.probe.meter), pytrace=False)


def job_of(item: pytest.Item) -> Job | None:
    """Return the job of `item`, made on first use; None for a test that is not measured."""
    if job_key not in item.stash and is_measured(item):
        item.stash[job_key] = Job(item)
    return item.stash.get(job_key, None)


def unseen_reason(item: pytest.Item) -> str:
    """Why the code of an item cannot be seen running."""
    return f"{type(item).__name__} items run their code where it cannot be measured"


def refuse_unseen(item: pytest.Item, job: Job) -> None:
    """Fail a test whose limits were never checked: silence would look like a pass."""
    limits = limits_of(item)
    if limits and not job.called:
        pytest.fail(
            f"{', '.join(limit.text for limit in limits)}: not checked. {unseen_reason(item)}; "
            "write it as a plain or async test function, or take the marker off",
            pytrace=False,
        )


@contextmanager
def measured_method(item: pytest.Item, job: Job) -> Iterator[None]:
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
