"""Keep the device's peaks when measured code resets them, because there is only one counter."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_cka_memory.meters.patching import Patch, SharedPatches

_RESET = "reset_peak_memory_stats"


class PeaksBeforeResets(SharedPatches):
    """The highest peaks in bytes that resets have erased since :meth:`forget`, while started.

    It patches the reset functions of ``torch.accelerator`` and of the device's module. Resets by a
    function that was imported before, or by the allocator directly, are not seen.
    """

    def __init__(self, device: torch.device, read: Callable[[], tuple[int, int]]) -> None:
        super().__init__()
        self.allocated_bytes = self.reserved_bytes = 0
        module = torch.get_device_module(device)
        self._modules = torch.accelerator, module, getattr(module, "memory", None)
        self._read = read

    def make_patches(self) -> Iterator[Patch]:
        for module in self._modules:
            if hasattr(module, _RESET):
                yield Patch(module, _RESET, _saving_before(getattr(module, _RESET), self.save))

    def save(self) -> None:
        """Keep the current peaks if they are the highest so far."""
        allocated_bytes, reserved_bytes = self._read()
        self.allocated_bytes = max(self.allocated_bytes, allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, reserved_bytes)

    def forget(self) -> None:
        """Drop the kept peaks, because the meter itself has reset the counter."""
        self.allocated_bytes = self.reserved_bytes = 0


def _saving_before(original: Callable[..., Any], save: Callable[[], None]) -> Callable[..., Any]:
    def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> Any:
        save()
        return original(*args, **kwargs)

    return reset_peak_memory_stats
