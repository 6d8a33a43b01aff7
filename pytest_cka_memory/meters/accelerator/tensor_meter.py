"""The meter for an accelerator whose allocator has no counters: it records every tensor on it."""

import torch

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.accelerator import backward_threads
from pytest_cka_memory.meters.accelerator.stats import device_name
from pytest_cka_memory.meters.cpu.by_storages import StorageMeter


class TensorMeter(StorageMeter):
    """Counts the bytes of the tensor storages on one device exactly, while started.

    Its peak is a lower bound, and there is no reserve: what the allocator has besides tensors,
    such as workspaces of libraries and unused blocks, cannot be read.

    Args:
        device: with its index.
        reason: that the allocator cannot be read; part of the notes.
    """

    name = "tensors counted, allocator not seen"

    def __init__(self, device: torch.device, reason: str) -> None:
        self._device = device
        super().__init__(device=device)
        self.notes = (reason, *StorageMeter.notes, *torch_private.LOST)
        self.device_name = device_name(device)

    def clean(self) -> int | None:
        # Running kernels hold tensors, and objects that a backward pass holds may be in a cycle.
        torch.accelerator.synchronize(self._device)
        backward_threads.wait_until_ended(self._device)
        return super().clean()
