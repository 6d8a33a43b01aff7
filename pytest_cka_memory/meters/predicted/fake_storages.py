"""Allocate a block of a simulated card for every fake storage, and free it with the storage."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cka_memory.meters.predicted.allocator import Block, CachingAllocator
from pytest_cka_memory.meters.torch_private import storage_key, storage_of_weak


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A storage that has a block. Weak, because a strong reference would itself be a leak."""

    __slots__ = ("block", "key", "size", "weak")

    key: int
    size: int
    block: Block | None
    """None for a storage of 0 bytes, for which PyTorch allocates no block."""
    weak: StorageWeakRef
    """Reference to the C++ storage, which may outlive its Python object."""


class FakeStorages:
    """The storages of one predicted card.

    Weak references report freed storages, in order. Their blocks are freed before the next block is
    allocated; for the allocator that is the same as freeing them at once.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self._entries: dict[int, _Entry] = {}
        self._freed: deque[_Entry] = deque()
        # Re-entrant: a collection inside may run a __del__ that computes with tensors.
        self._lock = threading.RLock()

    def add(self, storage: torch.UntypedStorage) -> bool:
        """Allocate a block if `storage` is new or resized; return whether it is.

        Raises:
            CapacityError: if the card is full.
        """
        size = storage.nbytes()
        known = self._entries.get(storage_key(storage))
        if known is not None and known() is storage and known.size == size:
            return False
        with self._lock:
            self.process_frees()
            block = self.allocator.allocate(size) if size else None
            known = self._entries.get(storage_key(storage))
            if known is not None:  # resized: PyTorch copies from the old block into the new
                self._free(known)
            self._enter(storage, size, block)
        return True

    def process_frees(self) -> None:
        """Free the blocks of all storages that have been freed so far."""
        with self._lock:
            while self._freed:
                entry = self._freed.popleft()
                if self._entries.get(entry.key) is not entry:
                    continue
                if entry.weak.expired():
                    self._free(entry)
                else:  # only its Python object was freed: continue with another one
                    storage = storage_of_weak(entry.weak.cdata)
                    self._enter(storage, entry.size, entry.block)

    def live(self) -> Iterator[torch.UntypedStorage]:
        """Yield every storage that has a block."""
        self.process_frees()
        for entry in list(self._entries.values()):
            storage = entry()
            if storage is not None:
                yield storage

    def _enter(self, storage: torch.UntypedStorage, size: int, block: Block | None) -> None:
        # The callback may run at any time in any thread, so it takes no lock.
        entry = _Entry(storage, self._freed.append)
        entry.key, entry.size, entry.block = storage_key(storage), size, block
        entry.weak = StorageWeakRef(storage)
        self._entries[entry.key] = entry

    def _free(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        if entry.block is not None:
            self.allocator.free(entry.block)
