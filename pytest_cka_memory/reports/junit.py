"""A region's figures as properties of its test, for JUnit XML and similar reports."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from pytest_cka_memory.core.figures import FIGURES
from pytest_cka_memory.core.places import anonymizer
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports.tables import provenance_of

Property = tuple[str, float | str]
"""``cka_memory.<label>.<figure>`` and its number; without a label if the region has none.

A device that was not measured is named too: ``cka_memory.device``.
"""

_PREFIX = "cka_memory."
LARGEST = f"{_PREFIX}largest"
"""The name for what :meth:`.MemoryProbe.largest` has returned, once for each call."""


def of_results(
    results: Sequence[Result], facts: Mapping[str, Any], root: Path | None = None
) -> list[Property]:
    """Return every figure of every region that was determined.

    Args:
        results: regions of one test.
        facts: device and meter, as :meth:`pytest_cka_memory.meters.Meter.facts` returns them.
        root: labels name files relative to this folder, and none outside it; None changes nothing.
    """
    records = [result.record for result in results]
    names_device = bool(records and provenance_of(facts).adjective)
    has_names = names_device or any(record.label for record in records)  # not of a whole test
    change = anonymizer(root) if has_names and root is not None else str
    figures: list[Property] = [
        (name, number)
        for record in records
        for name, number in zip(_names(change(record.label)), _figures_of(record), strict=True)
        if number is not None
    ]
    if figures and names_device:
        return [(f"{_PREFIX}device", change(facts["device_name"])), *figures]
    return figures


@lru_cache(maxsize=256)
def _names(label: str) -> tuple[str, ...]:
    """Return the names of all figures of a region, made once because pytest keeps each."""
    # XML cannot hold control characters, and pytest does not escape those in a name.
    label = "".join(char if char.isprintable() else "?" for char in label)
    start = f"{_PREFIX}{label}." if label else _PREFIX
    return tuple(f"{start}{name}" for name in FIGURES)


_figures_of = attrgetter(*FIGURES)
