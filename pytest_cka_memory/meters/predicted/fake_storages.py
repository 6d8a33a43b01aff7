"""Gives every fake storage a block of a simulated card, and takes it back when the storage dies."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cka_memory.meters.predicted.allocator import Block, CachingAllocator
from pytest_cka_memory.meters.torch_private import storage_key, storage_of_weak


class _Held(weakref.ref[torch.UntypedStorage]):
    """A storage that has a block. Weak: a strong reference here would be the leak we report."""

    __slots__ = ("block", "key", "size", "weak")

    key: int
    size: int
    block: Block | None
    """None for a storage of no bytes, for which PyTorch asks no block."""
    weak: StorageWeakRef
    """Of the storage itself, which may outlive its Python object."""


class Heap:
    """The storages of one predicted card. Deaths are told by weak references, and noted in order;
    blocks are given back before the next one is taken, which no allocator can tell from at once.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self._held: dict[int, _Held] = {}
        self._dead: deque[_Held] = deque()
        # Re-entrant: a collection inside may run a __del__ that computes with tensors.
        self._lock = threading.RLock()

    def hold(self, storage: torch.UntypedStorage) -> bool:
        """Give `storage` a block, or a new one if it was resized; whether that was news.

        Raises:
            CapacityError: where the card is full.
        """
        size = storage.nbytes()
        known = self._held.get(storage_key(storage))
        if known is not None and known() is storage and known.size == size:
            return False
        with self._lock:
            self.settle()
            block = self.allocator.allocate(size) if size else None
            known = self._held.get(storage_key(storage))
            if known is not None:  # resized: PyTorch copies from the old block into the new
                self._give_back(known)
            self._enter(storage, size, block)
        return True

    def settle(self) -> None:
        """Give back the block of every storage that has died so far."""
        with self._lock:
            while self._dead:
                held = self._dead.popleft()
                if self._held.get(held.key) is not held:
                    continue
                if held.weak.expired():
                    self._give_back(held)
                else:  # only its Python object has died: go on with another
                    storage = storage_of_weak(held.weak.cdata)
                    self._enter(storage, held.size, held.block)

    def living(self) -> Iterator[torch.UntypedStorage]:
        """Every storage that has a block."""
        self.settle()
        for held in list(self._held.values()):
            storage = held()
            if storage is not None:
                yield storage

    def _enter(self, storage: torch.UntypedStorage, size: int, block: Block | None) -> None:
        held = _Held(storage, self._dead.append)  # at any moment, in any thread: so no lock
        held.key, held.size, held.block = storage_key(storage), size, block
        held.weak = StorageWeakRef(storage)
        self._held[held.key] = held

    def _give_back(self, held: _Held) -> None:
        del self._held[held.key]
        if held.block is not None:
            self.allocator.free(held.block)
