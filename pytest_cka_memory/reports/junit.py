"""A region's figures as properties of its test, for JUnit XML and similar reports."""

from collections.abc import Sequence

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.verdicts import Result

Property = tuple[str, float]
"""``cka_memory.<label>.<figure>`` and its number; without a label if the region has none."""

_PREFIX = "cka_memory."


def of_results(results: Sequence[Result]) -> list[Property]:
    """Return every figure of every region that was determined."""
    return [pair for result in results for pair in _of_record(result.record)]


def _of_record(record: RegionRecord) -> list[Property]:
    # XML cannot hold control characters, and pytest does not escape those in a name.
    label = "".join(char if char.isprintable() else "?" for char in record.label)
    start = f"{_PREFIX}{label}." if label else _PREFIX
    numbers = ((name, getattr(record, name)) for name in FIGURES)
    return [(f"{start}{name}", number) for name, number in numbers if number is not None]
