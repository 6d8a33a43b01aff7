"""What all reports show of regions: rows, cells and columns of tables, and properties of tests."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pytest_cka_memory.core.figure_rows import Figure
from pytest_cka_memory.core.figures import COLUMNS, FIGURES, RegionRecord, shown_columns
from pytest_cka_memory.core.places import anonymizer
from pytest_cka_memory.core.verdicts import KNOWN, WARNED, Result
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.units import format_size

VERDICTS = ("BREACH", WARNED, "not judged", KNOWN, "no limit", "ok")
"""As in :attr:`Result.verdict`, the most urgent first."""
MOST = 100
"""Rows of a table if the user has named no other number."""

_ALWAYS = ("BREACH", WARNED)
_ALL = "all"
_NAMES = {row.column: row for row in COLUMNS} | {row.name: row for row in COLUMNS}
_BARS = "▁▂▃▄▅▆▇█"


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
            f"cannot use {text!r} for the table; write how many rows it shows (20 or all), the "
            f"column by which it is sorted (retained), or both (20:retained); the columns are "
            f"{columns}"
        )
    # A plain "all" is the only choice that keeps the order of the tests.
    most = None if number == _ALL else int(number or MOST)
    return RowChoice(most, figure, is_sorted=number != _ALL or bool(name))


def chosen(results: Sequence[Result], choice: RowChoice, elsewhere: str) -> ChosenRows:
    """Return the rows to show: broken limits and warnings always, then the largest.

    Args:
        results: every region.
        choice: how many, sorted by what.
        elsewhere: where the others are, for the sentence about them.
    """
    total = len(results)
    if choice.most is None or total <= choice.most:
        ordered = by_alarm(results, choice.figure) if choice.is_sorted else list(results)
        return ChosenRows(ordered, choice.is_sorted, "")
    urgent = by_alarm([each for each in results if each.verdict in _ALWAYS], choice.figure)
    # The others not by verdict: tests that failed are not judged, and would hide what was measured.
    others = [result for result in results if result.verdict not in _ALWAYS]
    others.sort(key=lambda result: _descending(result, choice.figure))
    shown = [*urgent, *others][: max(len(urgent), choice.most)]
    left = total - len(shown)
    text = f"{left:,} of {total:,} regions with a lower {choice.figure.noun} are left out"
    return ChosenRows(shown, True, f"{text}: {elsewhere}" if left else "")


def by_alarm(results: Sequence[Result], figure: Figure = FIGURES["peak_bytes"]) -> list[Result]:
    """Return results by how urgent their verdict is, then by a figure, the largest first.

    Args:
        results: the regions.
        figure: regions in which it is unknown are the last of their verdict.
    """

    def place(result: Result) -> tuple[int, float]:
        return VERDICTS.index(result.verdict), _descending(result, figure)

    return sorted(results, key=place)


def _descending(result: Result, figure: Figure) -> float:
    """Return what sorts regions by a figure, the largest first, and those without it last."""
    value = getattr(result.record, figure.name)
    return math.inf if value is None else -value


def known_columns(results: Sequence[Result]) -> list[Figure]:
    """Return the figures to show; some are left out if no region has a value."""
    return list(shown_columns(result.record for result in results))


def cells(result: Result, columns: Sequence[Figure]) -> dict[str, str]:
    """Return heading and text of every column of a region but its name.

    Args:
        result: the region.
        columns: the figures; a sparkline of the levels and the verdict follow them.
    """
    record = result.record
    texts = {figure.column: format_size(figure.shown_value(record)) for figure in columns}
    if "batches" in texts:  # a number, not a size
        texts["batches"] = str(record.batches or "-")
    # Garbage that was left to Python's collector may be in it.
    if "retained" in texts and record.garbage_left and record.retained_bytes:
        texts["retained"] = f"≤ {texts['retained']}"
    levels = [sample.allocated_bytes for sample in record.timeline]
    return {**texts, "timeline": sparkline(levels), "verdict": result.verdict}


def sparkline(levels: Sequence[float], width: int = 8) -> str:
    """Return levels as a line of bars, the lowest level as the lowest bar.

    Args:
        levels: bytes after each batch.
        width: most bars; of more levels, evenly spaced ones are shown.

    Example:
        >>> sparkline([0, 7, 3])
        '▁█▄'
    """
    if not levels:
        return ""
    step = max(1, len(levels) / width)
    shown = [levels[min(len(levels) - 1, int(i * step))] for i in range(min(width, len(levels)))]
    shown[-1] = levels[-1]  # exactly, because a leak shows at the end
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((level - low) * scale)] for level in shown)


def share_of_change(old: float, new: float) -> str:
    """Return ``+6.9%``; if there is nothing to compare with, the new size: ``+900 B``."""
    return f"{(new - old) / abs(old):+.1%}" if old else f"+{format_size(new)}"


def legend_of(columns: Iterable[Figure]) -> str:
    """Return the unit and the meaning of the columns of a table."""
    unit = "Sizes are in MB (2**20 bytes) unless a unit is given."
    meanings = [f"{row.column}: {row.legend}" for row in columns if row.legend]
    return f"{unit} {'; '.join(meanings)}." if meanings else unit


class Provenance(NamedTuple):
    """Where figures come from that were not measured on the device that they are for."""

    adjective: str
    """``predicted`` or ``emulated``."""
    notice: str
    """One sentence for the top of a report."""
    verb: str
    """How a failure message leads to the device."""

    @property
    def heading(self) -> str:
        """The heading of a report: ``Memory``, ``Predicted memory`` or ``Emulated memory``."""
        return f"{self.adjective} memory".strip().capitalize()


_MEASURED = Provenance("", "", "measured on")
_NOT_MEASURED = (
    Provenance(  # only in reports of earlier versions, which had predict:cuda
        "predicted",
        "These figures are predicted for the device; they were not measured on it.",
        "predicted for",
    ),
    Provenance(
        "emulated",
        "These figures come from torch's CUDA allocator on an emulated device; no GPU was used.",
        "emulated as",
    ),
)


def provenance_of(session: Mapping[str, Any]) -> Provenance:
    """Return where the figures of a session come from."""
    return _provenance(str(session.get("meter")).lower())


@lru_cache(maxsize=16)  # asked for each test, with the same text
def _provenance(meter: str) -> Provenance:
    return next((source for source in _NOT_MEASURED if source.adjective in meter), _MEASURED)


Property = tuple[str, float | str]
"""``cka_memory.<label>.<figure>`` and its number; without a label if the region has none.

A device that was not measured is named too: ``cka_memory.device``.
"""

_PREFIX = "cka_memory."
LARGEST_PROPERTY = f"{_PREFIX}largest"
"""The name for what :meth:`.MemoryProbe.largest` has returned, once for each call."""


def properties_of(
    results: Sequence[Result], facts: Mapping[str, Any], root: Path | None = None
) -> list[Property]:
    """Return every figure that was determined as a property of a test, for JUnit XML and the like.

    Args:
        results: regions of one test.
        facts: device and meter, as :meth:`pytest_cka_memory.meters.Meter.facts` returns them.
        root: labels name files relative to this folder, and none outside it; None changes nothing.
    """
    names_device = bool(results and provenance_of(facts).adjective)
    labels = [result.record.label for result in results]
    has_names = names_device or any(labels)  # not of a whole test
    change = anonymizer(root) if has_names and root is not None else str
    figures: list[Property] = []
    for result in results:
        figures += _named_figures(result.record, change(result.record.label))
    if figures and names_device:
        return [(f"{_PREFIX}device", change(facts["device_name"])), *figures]
    return figures


def _named_figures(record: RegionRecord, label: str) -> Sequence[Property]:
    """Return the figures of a region that were determined, with their names."""
    # Most regions have no additions, and each test has a region.
    if _OF_ADDITIONS.isdisjoint(vars(record)):
        return _determined(label, _USUAL, _usual_of(record))
    return _determined(label, _NAMES_OF_FIGURES, _figures_of(record))


@lru_cache(maxsize=16)  # many tests have the same figures: those that allocate nothing
def _determined(
    label: str, names: tuple[str, ...], values: tuple[float | None, ...]
) -> Sequence[Property]:
    named = zip(_names_in(label, names), values, strict=True)
    return [(name, number) for name, number in named if number is not None]


@lru_cache(maxsize=256)
def _names_in(label: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of figures of a region, made once because pytest keeps each."""
    # XML cannot hold control characters, and pytest does not escape those in a name.
    label = "".join(char if char.isprintable() else "?" for char in label)
    start = f"{_PREFIX}{label}." if label else _PREFIX
    return tuple(f"{start}{name}" for name in names)


_NAMES_OF_FIGURES = tuple(FIGURES)
_USUAL = tuple(name for name, row in FIGURES.items() if not row.measured_by)
_OF_ADDITIONS = frozenset(FIGURES).difference(_USUAL)
_figures_of = attrgetter(*_NAMES_OF_FIGURES)
_usual_of = attrgetter(*_USUAL)
