"""One peak counter serves all: a reset by the code that is measured must not erase what we saw."""

from collections.abc import Callable
from typing import Any

import torch

from pytest_cka_memory.meters.ledger.dispatch import replaced

_RESET = "reset_peak_memory_stats"


class KeptPeaks:
    """Peaks in bytes that a reset erased since :meth:`forget`; noted between start and stop.

    Resets are seen in ``torch.accelerator`` and the device's own module. One that was imported by
    name before, or asks the allocator past them, is not.
    """

    def __init__(self, device: torch.device, read: Callable[[], tuple[int, int]]) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        module = torch.get_device_module(device)
        self._places = torch.accelerator, module, getattr(module, "memory", None)
        self._read = read
        self._depth = 0
        self._undo: list[Callable[[], Any]] = []

    def start(self) -> None:
        """Watch for resets; starts nest."""
        if self._depth == 0:
            self._undo = [_noted(place, self.note) for place in self._places if _resets(place)]
        self._depth += 1

    def stop(self) -> None:
        """End what the matching :meth:`start` began."""
        self._depth -= 1
        if self._depth == 0:
            for undo in reversed(self._undo):
                undo()

    def note(self) -> None:
        """Keep the peaks of now."""
        allocated_bytes, reserved_bytes = self._read()
        self.allocated_bytes = max(self.allocated_bytes, allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, reserved_bytes)

    def forget(self) -> None:
        """Start anew: the reset was our own."""
        self.allocated_bytes = self.reserved_bytes = 0


def _resets(place: Any) -> bool:
    return hasattr(place, _RESET)


def _noted(place: Any, note: Callable[[], None]) -> Callable[[], Any]:
    """Call `note` before each reset at `place`; returns what ends that."""
    plain = getattr(place, _RESET)

    def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> Any:
        note()
        return plain(*args, **kwargs)

    return replaced(place, _RESET, reset_peak_memory_stats)
