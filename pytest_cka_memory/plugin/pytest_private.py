"""Every private name of pytest that the plugin uses; no other module may use one."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.outcomes import Failed as Failed  # pytest.fail.Exception, as a type

if TYPE_CHECKING:
    from _pytest.nodes import Node as Node  # pytest exports only its subclasses

_SET_UP_OF_CLASS = "_unittest_"
_SET_UPS = (_SET_UP_OF_CLASS, "_xunit_")
_REWRITING = "_pytest.assertion.rewrite"
_OBJECTS = ("_obj", "_instance")


@contextmanager
def plain_imports() -> Iterator[None]:
    """Import modules in the block as Python does, without pytest's rewriting of assertions.

    pytest rewrites the assertions in all modules of a plugin's distribution, because a plugin may
    have helpers for tests. Ours has none, and every session that measures would wait for it: it
    takes a third of the time of our imports.
    """
    finders = [finder for finder in sys.meta_path if type(finder).__module__ == _REWRITING]
    for finder in finders:
        sys.meta_path.remove(finder)
    try:
        yield
    finally:
        sys.meta_path[:0] = finders  # in front, where pytest has put them


def terminal_width(config: pytest.Config) -> int:
    """Return the characters of a line; a process without a terminal takes 80 or ``COLUMNS``.

    Workers of pytest-xdist have no terminal.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return shutil.get_terminal_size().columns
    width: int = config.get_terminal_writer().fullwidth
    return width


def ini_as_written(config: pytest.Config, key: str) -> Any:
    """Return the value of an ini key whose type in a TOML file is not the one that is declared."""
    written: Any = getattr(config, "_inicfg", {}).get(key)  # since pytest 9, as are TOML types
    return getattr(written, "value", None)


def without_capture(config: pytest.Config) -> AbstractContextManager[None]:
    """Return a context in which pytest captures no output, also if it is entered within a test."""
    captures = config.pluginmanager.get_plugin("capturemanager")
    if captures is None:
        return nullcontext()
    disabled: AbstractContextManager[None] = captures.global_and_fixture_disabled()
    return disabled


def is_set_up(fixture: pytest.FixtureDef[Any]) -> bool:
    """Whether pytest calls ``setUpClass``, ``setup_module`` and the like by this fixture."""
    return fixture.argname.startswith(_SET_UPS)


def is_set_up_of_testcase(fixture: pytest.FixtureDef[Any]) -> bool:
    """Whether pytest calls ``setUpClass`` of a ``unittest.TestCase`` by this fixture."""
    return fixture.argname.startswith(_SET_UP_OF_CLASS)


def parameter_ids(item: pytest.Item) -> tuple[str, ...]:
    """Return the ids of a test's parameters, one for each ``parametrize``; empty without them."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return ()
    return tuple(getattr(callspec, "_idlist", None) or callspec.id.split("-"))


def drop_instance(item: pytest.Item) -> None:
    """Drop the object of the test's class, which pytest keeps with ``self.model`` and the like.

    pytest makes it again if it is needed.
    """
    for name in _OBJECTS:
        vars(item).pop(name, None)
