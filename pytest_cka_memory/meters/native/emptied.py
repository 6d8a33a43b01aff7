"""Storages that are emptied and filled again, as FSDP does with parameters, are not new."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_cka_memory.meters.native.counter import Counter
from pytest_cka_memory.meters.native.library import NOT_LIVE
from pytest_cka_memory.meters.patching import Patch, SharedPatches


class EmptiedStorages(SharedPatches):
    """Passes the serial number of an emptied storage of one device to its next block."""

    def __init__(self, counter: Counter, device: torch.device) -> None:
        super().__init__()
        self._counter, self._device = counter, device
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        """Serial number and bytes before the storage was emptied."""

    def make_patches(self) -> Iterator[Patch]:
        yield self.patch(torch.UntypedStorage, "resize_", self.watching)

    def watching(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``UntypedStorage.resize_`` so that it takes note of storages it empties."""

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.device != self._device:
                return resize(storage, size)
            known = self._counter.serial_of(storage.data_ptr()), storage.nbytes()
            result = resize(storage, size)
            if size == 0 and known[0] != NOT_LIVE:
                self._known.setdefault(storage, known)
            elif size and storage in self._known:
                self._counter.inherit(storage.data_ptr(), *self._known.pop(storage))
            return result

        return resize_
