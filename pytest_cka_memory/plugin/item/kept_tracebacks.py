"""Free what a failed test's traceback keeps alive if another plugin keeps the traceback.

pytest drops the traceback of a failed test when the next test begins. A plugin that stores the
exception as an attribute of the test, as pytest-rerunfailures does, keeps every variable of the
failed code until the session ends, with all the memory that these refer to.
"""

import gc
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType, FunctionType
from typing import Any

import pytest

from pytest_cka_memory.plugin.pytest_private import drop_instance

_previous_key = pytest.StashKey[pytest.Item]()
_failed_key = pytest.StashKey[bool]()
_NOT_SEARCHED = frozenset({"funcargs"})
"""Attributes of a test that contain the user's values."""
_MOST_NESTED = 3
_PLAIN = frozenset({str, int, float, bool, type(None)})
_SEARCHED = frozenset({dict, list, tuple, pytest.ExceptionInfo, pytest.CallInfo})
"""Types that may contain an exception."""


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
    # Not before the test is run again, because a plugin may have wrapped its method.
    has_failed = previous is not None and previous.stash.get(_failed_key, False)
    if previous is not None and has_failed and previous is not item:
        drop_instance(previous)
    return bool(found) or has_failed


def note_failure(item: pytest.Item) -> None:
    """Record that the call of `item` has failed."""
    item.stash[_failed_key] = True


def _clear_variables(error: BaseException) -> None:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in frames:
        with suppress(RuntimeError):  # it is still running, such as the frames of pytest
            frame.clear()
            # Up to Python 3.12, pytest's reading of f_locals has copied the variables into a
            # dictionary that the frame keeps. Reading it again removes those that are gone.
            _ = frame.f_locals
    for frame in frames:
        _clear_closures(frame)


def _clear_closures(frame: FrameType) -> None:
    """Clear what the function of a frame has in its closure, if nothing else can reach it.

    A frame keeps its function. torch calls a module with hooks in a function whose closure has the
    module's arguments.
    """
    held = gc.get_referents(frame)
    for value, references in zip(held, _references(held), strict=True):
        if type(value) is not FunctionType or references > _ALONE + 1:  # the frame and our list
            continue
        cells = value.__closure__ or ()
        for cell, others in zip(cells, _references(cells), strict=True):
            if others <= _ALONE:
                with suppress(ValueError):  # it is empty
                    del cell.cell_contents


def _references(values: Sequence[Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


_ALONE = _references((object(),))[0]
"""What this counts for a value to which only the sequence refers; differs between Pythons."""


def _errors_kept_by(item: pytest.Item) -> Iterator[BaseException]:
    seen: set[int] = set()
    for name, value in vars(item).items():
        if name not in _NOT_SEARCHED and _may_contain(value):
            for error in _errors_in(value, _MOST_NESTED):
                yield from _with_causes(error, seen)


def _may_contain(value: Any) -> bool:
    """Whether `value` is an exception or of a type that is searched; quickly, for every test."""
    kind = type(value)
    if kind is tuple:  # most are names with their numbers
        return not _PLAIN.issuperset(map(type, value))
    return kind in _SEARCHED or issubclass(kind, BaseException)


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
            if _may_contain(part):
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
