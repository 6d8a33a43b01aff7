"""Every private name of pytest that the plugin uses; no other module may use one."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from _pytest.outcomes import Failed as PytestFailed  # pytest.fail.Exception, as a type

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


def written_keys(config: pytest.Config) -> list[str]:
    """Return the keys of the ini file and of ``--override-ini``."""
    written = getattr(config, "_inicfg", None)  # the public name warns since pytest 9
    return list(config.inicfg if written is None else written)


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


def has_class_fixture(cls: type) -> bool:
    """Whether a ``unittest.TestCase`` has a ``setUpClass`` or ``tearDownClass`` of its own."""
    import unittest

    names = ("setUpClass", "tearDownClass")
    own = (getattr(getattr(cls, name, None), "__func__", None) for name in names)
    inherited = (getattr(unittest.TestCase, name).__func__ for name in names)
    return any(one is not other for one, other in zip(own, inherited, strict=True))


def parameter_ids(item: pytest.Item) -> tuple[str, ...]:
    """Return the ids of a test's parameters, one for each ``parametrize``; empty without them."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return ()
    return tuple(getattr(callspec, "_idlist", None) or callspec.id.split("-"))


def parameters(item: pytest.Item) -> dict[str, Any]:
    """Return the values of a test's parameters by name; empty without them."""
    return dict(getattr(getattr(item, "callspec", None), "params", {}))


def drop_instance(item: pytest.Item) -> None:
    """Drop the object of the test's class, which pytest keeps with ``self.model`` and the like.

    pytest makes it again if it is needed.
    """
    for name in _OBJECTS:
        vars(item).pop(name, None)


_WIDTH = 100


class Failed(PytestFailed):
    """As ``pytest.fail(text, pytrace=False)`` raises it, with a line for summaries."""

    __module__ = "builtins"  # as pytest's own, because summaries show the name with its module

    def __init__(self, text: str, headline: str) -> None:
        super().__init__(text, pytrace=False)
        self.headline = headline


def fail(text: str, headline: str = "") -> NoReturn:
    """Fail the test with `text`.

    Args:
        text: everything that is known, for the section of the failure.
        headline: one line for summaries; by default the beginning of `text`.
    """
    __tracebackhide__ = True
    first = headline or text.partition("\n")[0]
    raise Failed(text, shorten(first, _WIDTH, placeholder=" ..."))


def show_headline(error: BaseException, report: pytest.TestReport) -> None:
    """Leave the headline of a failure as its message; its section keeps the whole text.

    With ``CI`` set, pytest's summary does not cut messages, and JUnit XML never does: each would
    repeat the whole text.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(error, Failed) and crash is not None:
        crash.message = f"{type(error).__name__}: {error.headline}"


def run_again(item: pytest.Item) -> list[pytest.TestReport]:
    """Run a test with new fixtures of every scope; return the reports of its phases.

    Nothing is logged. All fixtures are torn down at the end.
    """
    from _pytest.runner import runtestprotocol

    initialize = getattr(item, "_initrequest", None)
    if initialize is not None:  # the request of the last run refers to its fixtures
        initialize()
    return runtestprotocol(item, log=False, nextitem=None)
