"""Memory of tensors that does not come from torch's allocator, while regions are open.

NumPy arrays, buffers and other libraries lend their memory to tensors through a few functions of
torch. Storages that are resized in place move to a new block. Batches that a data loader has
received early are counted, but they are no growth.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.ledger.live_objects import storages_in
from pytest_cka_memory.meters.native.counter import Counter
from pytest_cka_memory.meters.native.emptied import EmptiedStorages
from pytest_cka_memory.meters.native.library import NOT_LIVE
from pytest_cka_memory.meters.patching import Patch
from pytest_cka_memory.meters.torch_private import LOADER_ITERATOR

_LENDERS = (
    (torch, "from_numpy"),
    (torch, "frombuffer"),
    (torch, "from_dlpack"),
    (torch, "as_tensor"),
    (torch, "asarray"),
    (torch.utils.dlpack, "from_dlpack"),
    (torch.UntypedStorage, "from_buffer"),
)
"""Functions that return a tensor or storage on memory which another library has allocated."""


class OtherMemory:
    """Reports lent memory to a counter while any object that has started it is live.

    An exception at any line, as a signal handler may raise it, leaves at most what the next start
    repairs.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._lock = threading.RLock()
        self._users: list[weakref.ref[Any]] = []
        self._patches: list[Patch] = []
        self._last: dict[tuple[Any, str], Patch] = {}
        """The last patch of each function, to be applied again: a new one takes ten times as long.
        """
        self._is_patched = False
        """Whether all functions are patched; False if patching them was interrupted."""
        self._hidden: list[Patch] = []
        """Patches that a user's own patch hid."""
        self._lent: dict[int, list[weakref.ref[torch.UntypedStorage]]] = {}
        """Address -> the storages on it: the same memory may be lent more than once."""
        self._emptied = EmptiedStorages(counter, torch.device("cpu"))
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()

    def start(self, user: object) -> None:
        """Patch the functions that lend memory, until `user` stops it or is freed."""
        with self._lock:
            others = [known for known in self._users if known() is not None]
            self._users = [*others, weakref.ref(user)]
            if not (others and self._is_patched):
                self._unpatch()  # what interrupted calls have left
                self._patch()

    def stop(self, user: object) -> None:
        """Undo what `user` has started; do nothing if it has started nothing."""
        with self._lock:
            self._users = [known for known in self._users if known() not in (None, user)]
            if not self._users:
                self._unpatch()

    def _patch(self) -> None:
        for owner, name in _LENDERS:
            self._replace(owner, name, self._lending)
        self._replace(torch.UntypedStorage, "resize_", self._emptied.watching)
        if LOADER_ITERATOR is not None:
            self._replace(LOADER_ITERATOR, "__next__", self._loading)
        self._is_patched = True

    def _unpatch(self) -> None:
        self._is_patched = False
        self._hidden = [patch for patch in (*self._patches, *self._hidden) if not patch.undo()]
        self._patches = []

    def prefetched_bytes(self) -> int:
        """Return the bytes of batches that data loaders have received but not yielded yet.

        Their number varies by chance, so it must not be taken for growth.
        """
        if not self._iterators:
            return 0
        storages = {
            storage.data_ptr(): storage.nbytes()
            for iterator in list(self._iterators)
            for batch in torch_private.received_early(iterator)
            for storage in storages_in(batch)
        }
        return sum(storages.values())

    def _replace(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        if hasattr(owner, name):
            patch = self._last.get((owner, name))
            if patch is None or not patch.fits():
                patch = Patch(owner, name, wrapper(getattr(owner, name)))
                self._last[owner, name] = patch
            self._patches.append(patch)
            patch.apply()

    def _lending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if torch.compiler.is_compiling():  # otherwise the rest would be traced as well
                return result
            # A tensor that was given may be returned again: its memory is not new.
            if not (args and isinstance(args[0], torch.Tensor)):
                for storage in storages_in(result):
                    self._add(storage)
            return result

        return function

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            self._iterators.add(iterator)
            return original(iterator)

        return __next__

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if storage.device.type != "cpu" or not address:
            return
        lent = self._lent.get(address)
        if lent is None:
            if self._counter.serial_of(address) != NOT_LIVE:
                return  # of torch's allocator
            self._counter.add(address, storage.nbytes(), is_new=True)
            lent = self._lent[address] = []

        def freed(reference: weakref.ref[torch.UntypedStorage]) -> None:
            lent.remove(reference)
            if not lent:
                del self._lent[address]
                self._counter.remove(address)

        if not any(known() is storage for known in lent):
            lent.append(weakref.ref(storage, freed))
