"""Kinds of test items, and how the code of each can be measured."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import pytest


def unseen_reason(item: pytest.Item) -> str:
    """Return why the code of an item of this kind cannot be measured."""
    return f"{type(item).__name__} items run their code in a way that cannot be measured"


def is_sync_testcase(item: pytest.Item) -> bool:
    """Whether `item` is a plain method of a ``unittest.TestCase``, which pytest calls itself."""
    if type(item) is pytest.Function:  # a test of such a class is of a subclass
        return False
    unittest = sys.modules.get("unittest")  # not imported for a session that has no such test
    cls = getattr(item, "cls", None)
    if unittest is None or cls is None or not issubclass(cls, unittest.TestCase):
        return False
    import inspect

    return not inspect.iscoroutinefunction(getattr(item, "obj", None))


def has_class_fixture(cls: type) -> bool:
    """Whether a ``unittest.TestCase`` has a ``setUpClass`` or ``tearDownClass`` of its own."""
    import unittest

    names = ("setUpClass", "tearDownClass")
    own = (getattr(getattr(cls, name, None), "__func__", None) for name in names)
    inherited = (getattr(unittest.TestCase, name).__func__ for name in names)
    return any(one is not other for one, other in zip(own, inherited, strict=True))


@contextmanager
def wrapped_method(
    item: pytest.Item, around: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Run a ``unittest.TestCase`` method inside `around`, between its setUp and its tearDown."""
    function = cast("pytest.Function", item)
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
