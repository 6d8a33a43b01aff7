"""Free what a failed test's traceback keeps alive if another plugin keeps the traceback.

pytest drops the traceback of a failed test when the next test begins. A plugin that stores the
exception as an attribute of the test, as pytest-rerunfailures does, keeps every variable of the
failed code until the session ends, with all the memory that these refer to.

A test goes on after one of its subtests has failed. What keeps that traceback is then released
before memory is read, because the test itself retains nothing of it.
"""

import gc
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from types import FrameType, FunctionType
from typing import Any

import pytest

from pytest_cka_memory.plugin.pytest_private import drop_instance

_previous_key = pytest.StashKey[pytest.Item]()
_raised_key = pytest.StashKey[bool]()
_failed_key = pytest.StashKey[bool]()
_frames_key = pytest.StashKey[set[int]]()
"""Identities of the frames in the tracebacks that pytest has shown during the call of a test."""
_NOT_SEARCHED = frozenset({"funcargs"})
"""Attributes of a test that contain the user's values."""
_MOST_NESTED = 3
_CONTAINERS = frozenset({dict, list, tuple})
_SEARCHED = frozenset({dict, list, tuple, pytest.ExceptionInfo, pytest.CallInfo})
"""Types that may contain an exception."""


def release_at_setup(item: pytest.Item) -> bool:
    """Clear the variables in the tracebacks of runs that have ended; return if there were any.

    These are runs of the test before `item`, or earlier runs of `item`. The exceptions themselves,
    their messages and the lines of their tracebacks stay.
    """
    previous = item.config.stash.get(_previous_key, None)
    item.config.stash[_previous_key] = item
    if _frames_key in item.stash:  # of an earlier run
        del item.stash[_frames_key]
    if previous is None or _raised_key not in previous.stash:  # to search takes a while
        return False
    errors, _ = _errors_kept_by(previous)
    for error in errors:
        _clear_variables(error)
    # Not before the test is run again, because a plugin may have wrapped its method.
    has_failed = previous.stash.get(_failed_key, False)
    if has_failed and previous is not item:
        drop_instance(previous)
    return bool(errors) or has_failed


def note_raised(item: pytest.Item) -> None:
    """Record that an exception has come from `item`, which any plugin may keep."""
    item.stash[_raised_key] = True


def note_exception(item: pytest.Item, error: BaseException) -> None:
    """Record the frames of an exception that the call, or a subtest in it, has raised."""
    frames = item.stash.setdefault(_frames_key, set())
    for each in _with_causes(error, set()):
        frames.update(id(frame) for frame, _ in traceback.walk_tb(each.__traceback__))


def release_in_call(item: pytest.Item) -> None:
    """Release what tracebacks of subtests keep, if another plugin or pytest keeps them.

    An exception that the user keeps as well is left as it is, because the test retains it.
    """
    if _frames_key not in item.stash:  # mostly; to get a default from the stash takes longer
        return
    noted = item.stash[_frames_key]
    if not noted:
        return
    running = _running_frames()
    errors, references = _errors_kept_by(item)
    for error, others in zip(errors, _references(errors), strict=True):
        own = references.get(id(error), 0) + _references_of_frames(error, running)
        if others <= _ALONE + own:
            _clear_variables(error)
    if sys.version_info < (3, 13):
        # pytest's reading of f_locals has copied the variables into a dictionary that the frame
        # keeps. Reading it again removes those that have been deleted since.
        for frame in running:
            _ = id(frame) in noted and frame.f_locals


def _running_frames() -> list[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _references_of_frames(error: BaseException, running: Sequence[FrameType]) -> int:
    """Return how often an exception is a variable of the code that has ended with it."""
    count = 0
    for frame in _frames_of(error) - set(running):
        for value in gc.get_referents(frame):
            count += value is error
            is_copy = type(value) is dict and value is not frame.f_globals
            if is_copy and value is not frame.f_builtins:
                count += sum(each is error for each in value.values())
    return count


def _frames_of(error: BaseException) -> set[FrameType]:
    """Return the frames of a traceback and those that called them.

    In Python 3.12 a frame that has ended keeps its callers, such as the end of a ``with`` block.
    """
    frames: set[FrameType] = set()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller: FrameType | None = frame
        while caller is not None and caller not in frames:
            frames.add(caller)
            caller = caller.f_back
    return frames


def note_failure(item: pytest.Item) -> None:
    """Record that the call of `item` has failed, perhaps without an exception."""
    item.stash[_failed_key] = item.stash[_raised_key] = True


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


def _errors_kept_by(item: pytest.Item) -> tuple[list[BaseException], Mapping[int, int]]:
    """Return the exceptions that attributes of `item` keep, and how often each is referenced.

    Counts have the identity of an exception as their key. Only references on the way from the
    attributes to the exception are counted.
    """
    keepers: dict[int, set[tuple[int, str]]] = {}
    errors: dict[int, BaseException] = {}
    for name, value in vars(item).items():
        kind = type(value)
        if kind not in _SEARCHED and not issubclass(kind, BaseException):
            continue  # of most attributes, for every test: so without a call
        if name not in _NOT_SEARCHED and _may_contain(value):
            for error, keeper in _errors_in(value, _MOST_NESTED, (id(item), name)):
                keepers.setdefault(id(error), set()).add(keeper)
                for each in _with_causes(error, set()):
                    errors[id(each)] = each
    for error in errors.values():
        for name, part in _causes(error):
            keepers.setdefault(id(part), set()).add((id(error), name))
    return list(errors.values()), {key: len(each) for key, each in keepers.items()}


def _may_contain(value: Any) -> bool:
    """Whether `value` is an exception, or may have one in it; quickly, for every test."""
    if type(value) not in _CONTAINERS:
        return _is_searched(type(value))
    parts = value.values() if type(value) is dict else value
    kinds = set(map(type, parts))
    if kinds == {tuple}:  # such as names with their numbers
        kinds = set(map(type, chain.from_iterable(parts)))
    return any(map(_is_searched, kinds))


def _is_searched(kind: type) -> bool:
    return kind in _SEARCHED or issubclass(kind, BaseException)


def _errors_in(
    value: Any, depth: int, keeper: tuple[int, str]
) -> Iterator[tuple[BaseException, tuple[int, str]]]:
    """Yield each exception in `value`, and what references it."""
    kind = type(value)
    if issubclass(kind, BaseException):
        yield value, keeper
    elif kind is pytest.ExceptionInfo:
        yield value.value, (id(value), "value")
    elif kind is pytest.CallInfo:
        yield from _errors_in(value.excinfo, depth, (id(value), "excinfo"))
    elif depth and kind in (dict, list, tuple):
        for number, part in enumerate(list(value.values() if kind is dict else value)):
            if _may_contain(part):
                yield from _errors_in(part, depth - 1, (id(value), str(number)))


def _with_causes(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, each once."""
    if id(error) in seen:
        return
    seen.add(id(error))
    yield error
    for _, part in _causes(error):
        yield from _with_causes(part, seen)


def _causes(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """Yield the exceptions that led to `error`, or are in its group, by how it references them."""
    parts = getattr(error, "exceptions", ())  # of an exception group
    members = list(enumerate(parts)) if type(parts) is tuple else []
    arguments = [(f"given {number}", part) for number, part in members]  # in its args too
    named = [("cause", error.__cause__), ("context", error.__context__)]
    for name, part in [*named, *((f"part {number}", part) for number, part in members), *arguments]:
        if isinstance(part, BaseException):
            yield name, part
