"""Which rows the table of a large session has: first what needs attention, then the largest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytest_cka_memory.core.figure import Figure
from pytest_cka_memory.core.figures import COLUMNS, FIGURES
from pytest_cka_memory.core.verdicts import KNOWN, WARNED, Result
from pytest_cka_memory.errors import ReportError

VERDICTS = ("BREACH", WARNED, "not judged", KNOWN, "no limit", "ok")
"""As in :attr:`Result.verdict`, the most urgent first."""
MOST = 100
"""Rows of a table if the user has named no other number."""

_ALWAYS = ("BREACH", WARNED)
_ALL = "all"
_NAMES = {row.column: row for row in COLUMNS} | {row.name: row for row in COLUMNS}


@dataclass(frozen=True)
class RowChoice:
    """How many rows a table has, and the figure by which they are sorted."""

    most: int | None = MOST
    """None for all of them."""
    figure: Figure = FIGURES["peak_bytes"]
    is_sorted: bool = False
    """Whether they are sorted even if all are shown; otherwise by collection, below their files."""


class ChosenRows(NamedTuple):
    """The rows that a table shows."""

    results: list[Result]
    is_sorted: bool
    left_out: str
    """A sentence about the others; empty if there are none."""


def choice_of(text: str) -> RowChoice:
    """Read ``20``, ``retained``, ``20:retained``, ``all`` or ``all:retained``.

    Raises:
        ReportError: for any other text; says what to write.
    """
    number, colon, name = text.partition(":")
    if not colon and not number.isdecimal() and number != _ALL:
        number, name = "", number
    figure = _NAMES.get(name or "peak")
    is_number = number in ("", _ALL) or (number.isdecimal() and int(number) > 0)
    if figure is None or not is_number or (colon and not name):
        columns = ", ".join(row.column for row in COLUMNS)
        raise ReportError(
            f"cannot use {text!r}; write a number of rows, a column, or both: 20, retained, "
            f"20:retained or all; the columns are {columns}"
        )
    most = None if number == _ALL else int(number or MOST)
    return RowChoice(most, figure, is_sorted=number != _ALL or bool(name))


def by_alarm(results: Sequence[Result], figure: Figure = FIGURES["peak_bytes"]) -> list[Result]:
    """Return results by how urgent their verdict is, then by a figure, the largest first."""

    def place(result: Result) -> tuple[int, float]:
        value = getattr(result.record, figure.name)
        return VERDICTS.index(result.verdict), math.inf if value is None else -value

    return sorted(results, key=place)


def chosen(results: Sequence[Result], choice: RowChoice, elsewhere: str) -> ChosenRows:
    """Return the rows to show: broken limits and warnings always, then the largest.

    Args:
        results: every region.
        choice: how many, sorted by what.
        elsewhere: where the others are, for the sentence about them.
    """
    total = len(results)
    if choice.most is None or total <= choice.most:
        found = by_alarm(results, choice.figure) if choice.is_sorted else list(results)
        return ChosenRows(found, choice.is_sorted, "")
    urgent = sum(result.verdict in _ALWAYS for result in results)
    found = by_alarm(results, choice.figure)[: max(urgent, choice.most)]
    left = total - len(found)
    text = f"{left:,} of {total:,} regions are left out, with a lower {choice.figure.noun}"
    return ChosenRows(found, True, f"{text}: {elsewhere}" if left else "")
