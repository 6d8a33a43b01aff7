"""Storages that are emptied and filled again, as FSDP does with parameters, are not new."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from pytest_cka_memory.meters.native.counter import Counter
from pytest_cka_memory.meters.native.library import NOT_LIVE
from pytest_cka_memory.meters.patching import Patch


class EmptiedStorages:
    """Passes the serial number of an emptied storage of one device to its next block."""

    def __init__(self, counter: Counter, device: torch.device) -> None:
        self._counter, self._device = counter, device
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        """Serial number and bytes before the storage was emptied."""
        self._users: list[weakref.ref[object]] = []
        self._patches: list[Patch] = []
        """Those that are not undone yet, for example because a user's own patch hides them."""

    def start(self, user: object) -> None:
        """Patch ``UntypedStorage.resize_`` until `user` stops it or is freed."""
        others = [known for known in self._users if known() is not None]
        self._users = [*others, weakref.ref(user)]
        if not others:
            self._unpatch()  # what interrupted calls have left
            owner = torch.UntypedStorage
            patch = Patch(owner, "resize_", self.watching(owner.resize_))
            self._patches.append(patch)
            patch.apply()

    def stop(self, user: object) -> None:
        """End what :meth:`start` began for `user`."""
        self._users = [known for known in self._users if known() not in (None, user)]
        if not self._users:
            self._unpatch()

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

    def _unpatch(self) -> None:
        self._patches = [patch for patch in self._patches if not patch.undo()]
