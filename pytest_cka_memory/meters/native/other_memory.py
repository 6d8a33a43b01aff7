"""Memory of tensors that does not come from torch's allocator, while regions are open.

NumPy arrays, buffers and other libraries lend their memory to tensors through a few functions of
torch. Storages that are resized in place move to a new block. Batches that a data loader has
received early are counted, but they are no growth.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.ledger.live_objects import storages_in
from pytest_cka_memory.meters.native.counter import Counter
from pytest_cka_memory.meters.native.emptied import EmptiedStorages
from pytest_cka_memory.meters.native.library import NOT_LIVE
from pytest_cka_memory.meters.patching import Patch, SharedPatches
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


class OtherMemory(SharedPatches):
    """Reports lent memory to a counter, and takes note of data loaders with workers."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter
        self._lent: dict[int, list[weakref.ref[torch.UntypedStorage]]] = {}
        """Address -> the storages on it: the same memory may be lent more than once."""
        self._emptied = EmptiedStorages(counter, torch.device("cpu"))
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()

    def make_patches(self) -> Iterator[Patch]:
        for owner, name in _LENDERS:
            if hasattr(owner, name):
                yield self.patch(owner, name, self._lending)
        yield self.patch(torch.UntypedStorage, "resize_", self._emptied.watching)
        if LOADER_ITERATOR is not None:
            yield self.patch(LOADER_ITERATOR, "__next__", self._loading)

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
