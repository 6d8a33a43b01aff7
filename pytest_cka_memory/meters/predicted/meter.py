"""A meter that predicts, on a machine without a GPU, what PyTorch would report on a CUDA card.

Code runs on fake tensors; each of their storages gets a block of a simulated allocator.
"""

import gc
import os
import threading
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.core.cards import Card
from pytest_cka_memory.errors import CapacityError
from pytest_cka_memory.meters.accelerator import backward_threads
from pytest_cka_memory.meters.base import Meter, Reading
from pytest_cka_memory.meters.ledger import live_objects
from pytest_cka_memory.meters.ledger.ledger import Ledger
from pytest_cka_memory.meters.ledger.live_objects import storages_of
from pytest_cka_memory.meters.predicted import device
from pytest_cka_memory.meters.predicted.allocator import Block, CachingAllocator
from pytest_cka_memory.meters.predicted.expandable_allocator import ExpandableAllocator
from pytest_cka_memory.meters.predicted.extra_allocations import temporaries
from pytest_cka_memory.meters.predicted.fake_storages import FakeStorages
from pytest_cka_memory.meters.predicted.workspaces import Workspaces
from pytest_cka_memory.meters.users import Users
from pytest_cka_memory.units import format_exact


class _Mark(NamedTuple):
    serial: int
    unowned_bytes: int
    """Requested bytes that no storage of the ledger had."""


class PredictedMeter(Meter):
    """Counts what PyTorch's allocator would count on a card; nothing is computed or allocated.

    Raises:
        DeviceError: if this torch version or another backend in this process does not allow it.
    """

    name = "predicted: fake tensors and a simulated CUDA caching allocator"
    notes = (
        "PREDICTED, not measured: no GPU ran",
        "blocks, segments and cuBLAS workspaces are modelled; cuDNN workspaces, most temporaries "
        "inside an operator and fused attention are not, so a peak may be too low or too high",
    )

    def __init__(self, card: Card) -> None:
        self.device = f"predict:cuda:{card.name}"
        self.device_name = f"{card.title}, predicted"
        self._card = card
        self._allocator = _allocator_for(os.environ, card)
        self._storages = FakeStorages(self._allocator)
        self._workspaces = Workspaces.from_environment(
            os.environ, torch.__version__, card.workspace_bytes
        )
        self._kept_workspaces: dict[tuple[str, int], Block] = {}
        """By library and thread: torch gives each thread, such as a backward thread, its own."""
        self._ledger = Ledger()
        self._users = Users()
        self._torch_device = device.register_device(self._on_operator)

    @property
    def torch_device(self) -> str:
        return str(self._torch_device)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "notes": [*self.notes, *live_objects.notes()]}

    def start(self) -> None:
        self.start_for(self)

    def stop(self) -> None:
        self.stop_for(self)

    def start_for(self, user: object) -> None:
        if not self._users:
            self._ledger = Ledger()
            for storage in self._storages.live():
                self._ledger.record(storage)
        self._users.add(user)

    def stop_for(self, user: object) -> None:
        self._users.remove(user)
        if not self._users:
            self._ledger = Ledger()

    def clean(self) -> int | None:
        backward_threads.wait_until_ended(self._torch_device)
        gc.collect()
        self._storages.process_frees()
        dropped = sum(block.requested for block in self._kept_workspaces.values())
        while self._kept_workspaces:
            self._allocator.free(self._kept_workspaces.popitem()[1])
        self._allocator.empty_cache()
        return dropped

    def read(self) -> Reading:
        self._storages.process_frees()
        allocator = self._allocator
        return Reading(
            allocated_bytes=allocator.allocated.current,
            requested_bytes=allocator.requested.current,
            peak_bytes=allocator.allocated.peak,
            reserved_bytes=allocator.reserved.current,
            peak_reserved_bytes=allocator.reserved.peak,
        )

    def reset_peak(self) -> None:
        self._storages.process_frees()
        self._allocator.reset_peak()
        self._ledger.reset_peak()

    def mark(self) -> _Mark:
        return _Mark(self._ledger.mark(), self._unowned_bytes())

    def retained_since(self, mark: _Mark) -> int:
        """Return the bytes of new storages, and what the allocator rose beyond all storages."""
        unowned_bytes = max(0, self._unowned_bytes() - mark.unowned_bytes)
        return self._ledger.retained_since(mark.serial) + unowned_bytes

    def _unowned_bytes(self) -> int:
        self._ledger.settle()
        return self.read().requested_bytes - self._ledger.level

    def serial(self) -> int:
        return self._ledger.serial

    def allocations_since(self, mark: _Mark) -> list[Allocation]:
        return self._ledger.allocations_since(mark.serial)

    def allocations_at_peak(self) -> list[AllocationGroup]:
        return self._ledger.alive_at_peak()

    def _on_operator(self, operator: Any, args: tuple[Any, ...], results: list[Any]) -> None:
        try:
            for tensor in results:
                for storage in storages_of(tensor):
                    if self._storages.add(storage) and self._users:
                        self._ledger.record(storage, tensor=tensor, operator=operator)
            self._take_temporaries(operator.name(), args, results[0])
        except CapacityError as error:
            raise torch.OutOfMemoryError(self._out_of_memory(*error.args)) from None

    def _take_temporaries(self, operator: str, args: tuple[Any, ...], result: Any) -> None:
        """Allocate what the operator allocates inside, and free it again, unless it is kept."""
        sizes = temporaries(operator, args, result)
        needed = self._needed_workspace(operator, args)
        if not sizes and needed is None:
            return
        self._storages.process_frees()
        blocks = []
        try:
            for size in filter(None, sizes):
                blocks.append(self._allocator.allocate(size))
            if needed is not None:
                workspace = self._allocator.allocate(needed[1])
                if self._workspaces.kept:
                    self._kept_workspaces[needed[0], threading.get_ident()] = workspace
                else:
                    blocks.append(workspace)
        finally:
            for block in blocks:
                self._allocator.free(block)

    def _needed_workspace(self, operator: str, args: tuple[Any, ...]) -> tuple[str, int] | None:
        """Return the library and the bytes of a workspace that must be allocated, if any."""
        shapes = [value.shape for value in args if isinstance(value, torch.Tensor)]
        needed = self._workspaces.needed_by(operator.partition(".")[0], shapes)
        if needed is None or not needed[1]:
            return None
        return None if (needed[0], threading.get_ident()) in self._kept_workspaces else needed

    def _out_of_memory(self, size: int) -> str:
        """Return PyTorch's message for this error, after the word "Predicted"."""
        reserved, allocated = self._allocator.reserved.current, self._allocator.allocated.current
        return (
            f"Predicted: CUDA out of memory. Tried to allocate {format_exact(size)}. "
            f"{self._card.title} has a total capacity of {format_exact(self._card.total_bytes)} of "
            f"which {format_exact(self._card.capacity_bytes - reserved)} is free. Of the memory in "
            f"use {format_exact(allocated)} is allocated by PyTorch, and "
            f"{format_exact(reserved - allocated)} is reserved by PyTorch but unallocated."
        )


def _allocator_for(environ: "os._Environ[str]", card: Card) -> CachingAllocator:
    """Return the allocator that PyTorch would use; it reads one variable under two names."""
    config = environ.get("PYTORCH_ALLOC_CONF", environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if "expandable_segments:true" in config.replace(" ", "").lower():
        return ExpandableAllocator(card.capacity_bytes)
    return CachingAllocator(card.capacity_bytes)
