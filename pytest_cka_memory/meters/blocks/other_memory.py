"""Memory of tensors that does not come from torch's allocator, while regions are open.

NumPy arrays, buffers and other libraries lend their memory to tensors through a few functions of
torch. Storages that are resized in place, or that are moved to shared memory to send them to
another process, have a new block but are not new. Batches that a data loader has received early are
counted, but they are no growth.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.blocks import windows
from pytest_cka_memory.meters.blocks.counter import Counter, Origin
from pytest_cka_memory.meters.blocks.emptied import EmptiedStorages
from pytest_cka_memory.meters.blocks.library import NOT_LIVE
from pytest_cka_memory.meters.patching import Patch, SharedPatches
from pytest_cka_memory.meters.storages.live_objects import storages_in, storages_of
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
_CPU = torch.device("cpu")
_HEADER_BYTES = 64
"""In front of the data of a storage that processes share by the name of a file, as they do with
the sharing strategy ``file_system``."""


class CompilablePatch(Patch):
    """Tells ``torch.compile`` about the function that is no longer replaced."""

    def undo(self) -> bool:
        """Restore the attribute; return whether that was possible."""
        is_undone = super().undo()
        if is_undone:
            torch_private.keep_compilable(self.function)
        return is_undone


class LentMemory(SharedPatches):
    """Reports to a counter what other libraries lend to tensors, and which storages are shared."""

    kind = CompilablePatch

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        torch_private.list_constructors()
        self._counter = counter

    def make_patches(self) -> Iterator[Patch]:
        for owner, name in _LENDERS:
            if hasattr(owner, name):
                patch = self.patch(owner, name, functools.partial(self._lending, owner, name))
                torch_private.keep_scriptable(patch.function, getattr(owner, name))
                yield patch
        for name in torch_private.SHARING:
            yield self.patch(torch.UntypedStorage, name, self._sharing)

    def _lending(self, owner: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if torch.compiler.is_compiling():  # otherwise the rest would be traced as well
                return result
            # A tensor that was given may be returned again, and a part of a storage be used, as
            # safetensors does with a mapped file: that memory is not new.
            if args and isinstance(args[0], (torch.Tensor, torch.UntypedStorage)):
                return result
            storages = storages_of(result) if type(result) is torch.Tensor else storages_in(result)
            for storage in storages:
                windows.add(storage, is_new=True)
            return result

        # Pickle writes a function as its name, which that of a builtin function is not.
        in_module = inspect.ismodule(owner)
        function.__module__ = owner.__name__ if in_module else owner.__module__
        function.__qualname__ = name if in_module else f"{owner.__name__}.{name}"
        return function

    def _sharing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def share(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            if storage.device != _CPU:
                return original(storage, *args, **kwargs)
            address, origin = storage.data_ptr(), self._origin_of(storage)
            result = original(storage, *args, **kwargs)
            if storage.data_ptr() != address:
                self._move(storage, origin)
            return result

        return share

    def _origin_of(self, storage: torch.UntypedStorage) -> Origin:
        # What is not counted was lent before the region began.
        origin = self._counter.origin_of(self._block_of(storage))
        if origin is not None and not windows.has(storage):
            return origin
        # Lent memory may be several blocks.
        return Origin(serial=origin.serial if origin else 0, bytes=storage.nbytes())

    def _move(self, storage: torch.UntypedStorage, origin: Origin) -> None:
        """Take note that a storage is in shared memory now, and no longer where it was."""
        block = self._block_of(storage)
        header_bytes = storage.data_ptr() - block
        self._counter.inherit(block, Origin(origin.serial, origin.bytes + header_bytes))
        windows.remove(storage)

    def _block_of(self, storage: torch.UntypedStorage) -> int:
        """Return the address of the counted block that contains the data of a storage."""
        address = storage.data_ptr()
        has_header = (
            storage.is_shared()
            and self._counter.serial_of(address) == NOT_LIVE
            and self._counter.serial_of(address - _HEADER_BYTES) != NOT_LIVE
        )
        return address - _HEADER_BYTES if has_header else address


class OtherMemory(LentMemory):
    """Takes note also of storages that are emptied, and of data loaders with workers."""

    def __init__(self, counter: Counter) -> None:
        super().__init__(counter)
        self._emptied = EmptiedStorages(counter, torch.device("cpu"))
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()

    def make_patches(self) -> Iterator[Patch]:
        yield from super().make_patches()
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
            storage.data_ptr(): storage.nbytes() + storage.data_ptr() - self._block_of(storage)
            for iterator in list(self._iterators)
            for batch in torch_private.received_early(iterator)
            for storage in storages_in(batch)
        }
        return sum(storages.values())

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            self._iterators.add(iterator)
            return original(iterator)

        return __next__
