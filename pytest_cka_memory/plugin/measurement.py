"""Open and close the regions of one test; :mod:`.judging` judges them."""

import functools
import inspect
import sys
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import Any, cast

import pytest

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.measure.region import Region
from pytest_cka_memory.measure.region_context import ReportedRegion, end_region
from pytest_cka_memory.plugin.judging import (
    CallOutcome,
    ItemJudge,
    are_untouched,
    judge_key,
    judge_of,
    properties_key,
)
from pytest_cka_memory.plugin.plan import plan_of
from pytest_cka_memory.plugin.pytest_private import fail

__all__ = [
    "begin",
    "end_unmeasured",
    "forget",
    "is_testcase",
    "judge_key",
    "judge_of",
    "measured_call",
    "measured_method",
    "repeated_function",
]

RunEnded = Callable[[int], None]
"""Called with the number of a run of a test, from 1, when it has ended."""


def measured_method(item: pytest.Item, judge: ItemJudge) -> Generator[None, Any, Any]:
    """Measure a method of a ``unittest.TestCase``: see :func:`is_testcase`."""
    around = contextmanager(partial(measured_call, item, judge))
    with _inside_method(item, judge.runs, around):
        return (yield)


def repeated_function(item: pytest.Function, judge: ItemJudge) -> Generator[None, Any, Any]:
    """Measure the function of a test that runs several times."""
    with (
        contextmanager(measured_call)(item, judge) as run_ended,
        _replaced_function(item, _repeated(item, item.obj, judge.runs, run_ended)),
    ):
        return (yield)


def measured_call(item: pytest.Item, judge: ItemJudge) -> Generator[RunEnded, Any, Any]:
    """Measure the test function as a whole, in case it opens no region, then judge.

    Yields:
        What is to be called when a run of the function has ended, if it runs several times.

    Returns:
        What was sent to it.
    """
    in_fixtures = len(judge.records)
    judge.begin_call()
    records: list[RegionRecord] = []
    returned = False
    compared: Sequence[tuple[str, RegionRecord]] = ()
    if judge.files is not None:
        judge.files.begin()
    try:
        region: Region | ReportedRegion | None = None
        try:
            region = judge.begin_region()
            completed = False
            try:
                # Weak, because the caller has it until the test is judged.
                result = yield partial(_end_run, weakref.ref(region), judge, in_fixtures)
                completed = True
            finally:
                # Without a name, because the exception's traceback references this frame.
                records.append(
                    end_region(region, completed, None if completed else sys.exc_info()[1])
                )
            returned = True
        except AssertionError as error:
            if _were_compared(error):
                compared = judge.explain_compared(error)
            raise
        finally:
            region = None  # it references the meter's peaks
            if len(judge.records) == in_fixtures:
                judge.records.extend(records)
            if is_testcase(item) and _keeps_failed_subtests(item):
                judge.complete_none(in_fixtures)
            outcome = CallOutcome(True, returned, are_untouched(records, judge.meter), compared)
            judgement = judge.end_call(outcome, records)
            if judge.files is not None:
                failed = not returned or judgement.is_broken
                # Without a name, as above.
                line = judge.files.end(None if returned else sys.exc_info()[1], failed=failed)
                if line:
                    item.add_report_section("call", "cka-memory", line)
    finally:
        if judge.files is not None:
            judge.files.close()
    judge.fail_on_breach(judgement)
    return result


def _end_run(
    weak: "weakref.ref[Region | ReportedRegion]", judge: ItemJudge, in_fixtures: int, number: int
) -> None:
    """Note that the run `number` of a test has ended, whose whole is measured by a region."""
    region = weak()
    assert isinstance(region, Region), "it is open, and growth over the runs is judged"
    region.batch_done()
    if number < judge.runs:  # the regions of the last run count
        judge.forget_from(in_fixtures)


def _repeated(
    item: pytest.Item, method: Callable[..., object], runs: int, run_ended: RunEnded
) -> Callable[..., object]:
    """Return the function of a test, or one that calls it several times until it raises.

    The values of fixtures are the same in all runs.

    Args:
        item: the test.
        method: its function.
        runs: how often.
        run_ended: called with the number of a run, from 1, when it has ended.
    """
    if runs == 1:
        return method

    @functools.wraps(method)
    def all_runs(*args: object, **kwargs: object) -> None:
        __tracebackhide__ = True
        for number in range(1, runs + 1):
            try:
                method(*args, **kwargs)
            except Exception:
                item.add_report_section("call", "cka-memory", f"run {number} of {runs} has failed")
                raise
            run_ended(number)

    return all_runs


@contextmanager
def _replaced_function(item: pytest.Function, replacement: Callable[..., object]) -> Iterator[None]:
    """Let pytest call `replacement` in place of the function of a test."""
    original = item.obj
    if replacement is original:
        yield
        return
    item.obj = replacement
    try:
        yield
    finally:
        item.obj = original


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


def _is_async(item: pytest.Item) -> bool:
    return inspect.iscoroutinefunction(getattr(item, "obj", None))


@contextmanager
def _inside_method(
    item: pytest.Item, runs: int, around: Callable[[], AbstractContextManager[RunEnded]]
) -> Iterator[None]:
    """Run a ``unittest.TestCase`` method inside `around`, between its setUp and its tearDown."""
    function = cast("pytest.Function", item)
    if _is_async(item):
        with _inside_async_method(function, around):
            yield
        return
    method = function.obj

    @functools.wraps(method)
    def measured(*args: object, **kwargs: object) -> object:
        with around() as run_ended:
            return _repeated(item, method, runs, run_ended)(*args, **kwargs)

    with _replaced_function(function, measured):
        yield


@contextmanager
def _inside_async_method(
    function: pytest.Function, around: Callable[[], AbstractContextManager[RunEnded]]
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


def _keeps_failed_subtests(item: pytest.Item) -> bool:
    """Whether unittest keeps the tracebacks of failed subtests while a test runs.

    Up to Python 3.10 it reports them when the test has ended, so nothing of them can be released.
    """
    outcome = getattr(getattr(item, "instance", None), "_outcome", None)
    return any(error for _, error in getattr(outcome, "errors", ()))


def _were_compared(error: AssertionError) -> bool:
    """Whether `error` comes from code that reads figures: ``assert region.retained_mb == 0``.

    The frame that raised it counts, or the one that called a method such as ``assertEqual``.
    """
    from pytest_cka_memory.measure.repeated_runs import Sweep

    names = {name for row in FIGURES.values() for name in (row.name, row.mb_name)}
    names.update(name for name in vars(Sweep) if "_mb" in name)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    while frames and _is_of_unittest(frames[-1]):
        frames.pop()
    return bool(frames) and not names.isdisjoint(frames[-1].f_code.co_names)


def _is_of_unittest(frame: FrameType) -> bool:
    unittest = sys.modules.get("unittest.case")  # not imported for a session that has no such test
    return unittest is not None and frame.f_globals is vars(unittest)


def begin(item: pytest.Item) -> None:
    """Drop the measurement of an earlier run of `item`, and check its limits again."""
    forget(item)  # of one without a teardown
    if properties_key in item.stash:  # a plugin such as pytest-rerunfailures runs it again
        ours = {id(added) for added in item.stash[properties_key]}
        item.user_properties[:] = [p for p in item.user_properties if id(p) not in ours]
        del item.stash[properties_key]
    plan_of(item).usable_limits()


def forget(item: pytest.Item) -> None:
    """Drop the measurement of a run that has ended; its reports have its figures.

    pytest keeps all items until the session ends, and what they keep is looked at by each full
    garbage collection.
    """
    if judge_key in item.stash:
        del item.stash[judge_key]


def end_unmeasured(item: pytest.Item) -> None:
    """Fail a test that got a marker while it ran; judge one that requested the fixture then."""
    limits = plan_of(item).usable_limits()
    if limits:
        fail(
            f"{', '.join(limit.text for limit in limits)}: not checked, because the test was "
            "already running when this marker was added; add it in a fixture, or write it on the "
            "test",
        )
    if judge_key in item.stash:
        item.stash[judge_key].judge_without_limits()
