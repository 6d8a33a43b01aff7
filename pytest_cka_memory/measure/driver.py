"""The memory of the card as its driver counts it, and what of it is outside torch's allocator."""

from typing import Any

from pytest_cka_memory.measure.addition import Addition
from pytest_cka_memory.meters.base import Meter, Peaks


class DriverMemory(Addition):
    """Reads the driver at the start, at batch boundaries and when the region's code has ended."""

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._peaks, self._meter = peaks, meter
        now = self._read()
        self._is_known = now is not None
        self._start = self._end = self._highest = now or (0, 0)

    def boundary(self) -> None:
        now = self._read()
        if now is not None:
            self._highest = max(self._highest[0], now[0]), max(self._highest[1], now[1])
            self._end = now

    def finish(self) -> None:
        self.boundary()

    def fields(self) -> dict[str, Any]:
        if not self._is_known:
            return {}
        return {
            "driver_start_bytes": self._start[0],
            "driver_peak_bytes": self._highest[0],
            "driver_end_bytes": self._end[0],
            "outside_start_bytes": self._start[1],
            "outside_peak_bytes": self._highest[1],
        }

    def _read(self) -> tuple[int, int] | None:
        """Return the bytes that are in use on the card, and those outside torch's allocator."""
        driver = self._meter.driver()
        if driver is None:
            return None
        used_bytes = driver.used_bytes
        return used_bytes, used_bytes - (self._peaks.read().reserved_bytes or 0)
