"""Free what a failed test's traceback keeps alive if another plugin keeps the traceback.

pytest drops the traceback of a failed test when the next test begins. A plugin that stores the
exception as an attribute of the test, as pytest-rerunfailures does, keeps every variable of the
failed code until the session ends, with all the memory that these refer to.
"""

import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

_previous_key = pytest.StashKey[pytest.Item]()
_NOT_SEARCHED = frozenset({"funcargs"})
"""Attributes of a test that contain the user's values."""
_MOST_NESTED = 3


def release_at_setup(item: pytest.Item) -> bool:
    """Clear the variables in the tracebacks of runs that have ended; return if there were any.

    These are runs of the test before `item`, or earlier runs of `item`. The exceptions themselves,
    their messages and the lines of their tracebacks stay.
    """
    previous = item.config.stash.get(_previous_key, None)
    item.config.stash[_previous_key] = item
    found = [] if previous is None else list(_errors_kept_by(previous))
    for error in found:
        _clear_variables(error)
    return bool(found)


def _clear_variables(error: BaseException) -> None:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        with suppress(RuntimeError):  # it is still running, such as the frames of pytest
            frame.clear()
            # Up to Python 3.12, pytest's reading of f_locals has copied the variables into a
            # dictionary that the frame keeps. Reading it again removes those that are gone.
            _ = frame.f_locals


def _errors_kept_by(item: pytest.Item) -> Iterator[BaseException]:
    seen: set[int] = set()
    for name, value in vars(item).items():
        if name not in _NOT_SEARCHED:
            for error in _errors_in(value, _MOST_NESTED):
                yield from _with_causes(error, seen)


def _errors_in(value: Any, depth: int) -> Iterator[BaseException]:
    kind = type(value)
    if issubclass(kind, BaseException):
        yield value
    elif kind is pytest.ExceptionInfo:
        yield value.value
    elif kind is pytest.CallInfo:
        yield from _errors_in(value.excinfo, depth)
    elif depth and kind in (dict, list, tuple):
        for part in list(value.values() if kind is dict else value):
            yield from _errors_in(part, depth - 1)


def _with_causes(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, each once."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    parts = getattr(error, "exceptions", ())  # of an exception group
    for part in (error.__cause__, error.__context__, *(parts if type(parts) is tuple else ())):
        if part is None or isinstance(part, BaseException):
            yield from _with_causes(part, seen)
