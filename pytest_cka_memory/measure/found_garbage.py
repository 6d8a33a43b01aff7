"""Garbage in reference cycles that a region with limits has left: each cycle, as code."""

from collections.abc import Collection
from typing import Any

from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.measure.addition import Addition
from pytest_cka_memory.meters.base import Meter, Peaks


class FoundGarbage(Addition):
    """Describes garbage that a census has found.

    To describe all of it each time would take longer than the batches, so it is done whenever there
    is twice as much as before. What was described last is therefore at least half of the most.
    """

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._peaks, self._meter = peaks, meter
        self._most = 0
        self._holdings: tuple[Holding, ...] = ()

    def look(self, garbage: list[Any] | None, serials: Collection[int] = ()) -> None:
        if garbage is None or len(serials) < 2 * self._most:
            return
        allocations = self._meter.allocations_since(self._peaks.mark)
        kept = [each for each in allocations if each.serial in serials]
        if kept:
            from pytest_cka_memory.holders import cycles

            self._most = len(serials)
            self._holdings = cycles.live_holdings(cycles.described_garbage(garbage, kept))

    def fields(self) -> dict[str, Any]:
        return {"garbage": self._holdings}
