"""A region's figures as properties of its test: JUnit XML and other reporters pick them up."""

from collections.abc import Sequence

from pytest_cka_memory.core.figures import NUMBERS, RegionRecord
from pytest_cka_memory.core.verdicts import Result

Property = tuple[str, float]
"""``cka_memory.<label>.<figure>`` -> its number; without a label where the region has none."""

_PREFIX = "cka_memory."


def of_results(results: Sequence[Result]) -> list[Property]:
    """Every figure that was determined, of every region."""
    return [pair for result in results for pair in _of_record(result.record)]


def _of_record(record: RegionRecord) -> list[Property]:
    # XML has no place for control characters, and pytest escapes none in a name.
    label = "".join(char if char.isprintable() else "?" for char in record.label)
    start = f"{_PREFIX}{label}." if label else _PREFIX
    numbers = ((name, getattr(record, name)) for name in NUMBERS)
    return [(f"{start}{name}", number) for name, number in numbers if number is not None]
