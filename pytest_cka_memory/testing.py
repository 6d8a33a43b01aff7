"""A meter that tests control, for tests of this plugin and of plugins that extend it."""

from itertools import count

from pytest_cka_memory.meters.base import DriverReading, Meter, Reading


class ScriptedMeter(Meter):
    """A meter whose figures a test sets; every report states that they are scripted.

    Args:
        has_reserve: whether the device has a reserve, as a GPU has: the highest level so far, until
            :meth:`clean` returns it.
        total_bytes: the memory of the card, for limits on what is outside the allocator; None for
            a device without a driver.

    Example:
        >>> meter = ScriptedMeter()
        >>> block = meter.allocate(512)
        >>> meter.read().allocated_bytes
        512
        >>> meter.free(block)
    """

    device = "cpu"
    device_name = "no device"
    name = "scripted figures"
    notes = ("nothing was measured: a test wrote these figures by hand",)

    def __init__(self, *, has_reserve: bool = False, total_bytes: int | None = None) -> None:
        self._has_reserve = has_reserve
        self._total_bytes = total_bytes
        self.outside_bytes = 0
        """Memory of the card outside the allocator, if `total_bytes` is given: its size."""
        self._blocks: dict[int, int] = {}
        self._handles = count(1)
        self._last = 0
        self._workspace_bytes = 0
        self._reserved = 0
        self._peak = 0
        self._peak_reserved = 0

    def allocate(self, size_bytes: int) -> int:
        """Allocate a block.

        Args:
            size_bytes: its size.

        Returns:
            Its handle for :meth:`free`; handles rise by 1.
        """
        self._last = next(self._handles)
        self._blocks[self._last] = size_bytes
        self._rise()
        return self._last

    def free(self, handle: int) -> None:
        """Free a block; its bytes stay reserved until :meth:`clean`.

        Args:
            handle: what :meth:`allocate` has returned.

        Raises:
            KeyError: if the block was freed before.
        """
        del self._blocks[handle]

    def use_workspace(self, size_bytes: int) -> None:
        """Allocate a library's workspace, which only :meth:`clean` drops.

        Args:
            size_bytes: its size; several workspaces add up.
        """
        self._workspace_bytes += size_bytes
        self._rise()

    def start(self) -> None:
        """Do nothing: scripted figures need no counting."""

    def stop(self) -> None:
        """Do nothing: scripted figures need no counting."""

    def clean(self) -> int | None:
        dropped, self._workspace_bytes = self._workspace_bytes, 0
        self._reserved = self._level()
        return dropped if self._has_reserve else None

    def read(self) -> Reading:
        return Reading(
            allocated_bytes=self._level(),
            requested_bytes=self._level(),
            peak_bytes=self._peak,
            reserved_bytes=self._reserved if self._has_reserve else None,
            peak_reserved_bytes=self._peak_reserved if self._has_reserve else None,
        )

    def driver(self) -> DriverReading | None:
        if self._total_bytes is None:
            return None
        used_bytes = self._reserved + self.outside_bytes
        return DriverReading(self._total_bytes - used_bytes, self._total_bytes)

    def reset_peak(self) -> None:
        self._peak = self._level()
        self._peak_reserved = self._reserved

    def mark(self) -> int:
        return self._last

    def retained_since(self, mark: int) -> int:
        return sum(size for handle, size in self._blocks.items() if handle > mark)

    def _level(self) -> int:
        return sum(self._blocks.values()) + self._workspace_bytes

    def _rise(self) -> None:
        self._reserved = max(self._reserved, self._level())
        self._peak = max(self._peak, self._level())
        self._peak_reserved = max(self._peak_reserved, self._reserved)
