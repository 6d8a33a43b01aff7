"""The shares of the kinds of memory at a peak, as lines of a terminal."""

from collections.abc import Iterator

from pytest_cka_memory.core import kinds
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.reports.wrapping import wrapped


def kinds_lines(record: RegionRecord, figure: str, width: int, indent: str = "  ") -> Iterator[str]:
    """Yield the shares of the kinds of memory at the peak, as lines that end after a percentage."""
    joined = kinds.line(record, figure).replace(" %", "\N{NO-BREAK SPACE}%")
    for text in wrapped(joined, width, indent):
        yield text.replace("\N{NO-BREAK SPACE}", " ")
