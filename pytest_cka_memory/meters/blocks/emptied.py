"""Storages that are emptied and filled again, as FSDP does with parameters, are not new."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_cka_memory.meters.blocks.counter import Counter, Origin
from pytest_cka_memory.meters.patching import Patch, SharedPatches


class EmptiedStorages(SharedPatches):
    """Passes the origin of an emptied storage of one device to its next block."""

    def __init__(self, counter: Counter, device: torch.device) -> None:
        super().__init__()
        self._counter, self._device = counter, device
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, Origin] = (
            weakref.WeakKeyDictionary()
        )
        """What was known of a storage before it was emptied."""

    def make_patches(self) -> Iterator[Patch]:
        yield self.patch(torch.UntypedStorage, "resize_", self.watching)

    def watching(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``UntypedStorage.resize_`` so that it takes note of storages it empties."""

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.device != self._device:
                return resize(storage, size)
            known = self._counter.origin_of(storage.data_ptr())
            result = resize(storage, size)
            if size == 0 and known is not None:
                self._known.setdefault(storage, known)
            elif size and storage in self._known:
                self._counter.inherit(storage.data_ptr(), self._known.pop(storage))
            return result

        return resize_
