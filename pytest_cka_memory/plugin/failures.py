"""Fail tests with a message of many lines, of which pytest's summaries show a single one."""

from textwrap import shorten
from typing import NoReturn

import pytest

from pytest_cka_memory.plugin.pytest_private import Failed as PytestFailed

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


def show_headline(call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Leave the headline of a failure as its message; its section keeps the whole text.

    With ``CI`` set, pytest's summary does not cut messages, and JUnit XML never does: each would
    repeat the whole text.
    """
    error = None if call.excinfo is None else call.excinfo.value
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(error, Failed) and crash is not None:
        crash.message = f"{type(error).__name__}: {error.headline}"
