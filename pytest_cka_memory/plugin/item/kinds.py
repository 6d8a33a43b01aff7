"""Kinds of test items, and how the code of each can be measured."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import pytest

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


def has_class_fixture(cls: type) -> bool:
    """Whether a ``unittest.TestCase`` has a ``setUpClass`` or ``tearDownClass`` of its own."""
    import unittest

    names = ("setUpClass", "tearDownClass")
    own = (getattr(getattr(cls, name, None), "__func__", None) for name in names)
    inherited = (getattr(unittest.TestCase, name).__func__ for name in names)
    return any(one is not other for one, other in zip(own, inherited, strict=True))


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
    import inspect  # only for a session with a TestCase

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
