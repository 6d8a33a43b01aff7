"""Regions while they are open. This module itself tells others about regions that have ended.

It imports nothing: pytest's plugin, which reports the regions of fixtures, imports it in every
session that measures, before the first test. All else here is imported when a region opens.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_cka_memory.core.figures import RegionRecord

    Observer = Callable[[Any, RegionRecord], None]
    """Called with a ``MemoryProbe`` and the record of its region."""

_observers: "list[Observer]" = []


def observe_regions(observer: "Observer") -> Callable[[], None]:
    """Call `observer` for each region of a probe without an explainer; return how to end that."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def note_end(probe: object, record: "RegionRecord") -> None:
    """Tell the observers that a region of `probe` has ended."""
    for observer in _observers:
        observer(probe, record)
