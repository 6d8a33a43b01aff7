"""Run a test several times in one process, for ``--cka-memory-repeat=N``."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import pytest

from pytest_cka_memory.plugin.session.settings import settings_key

if TYPE_CHECKING:
    from pytest_cka_memory.limits import FlatPerBatch

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
