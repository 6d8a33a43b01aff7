"""Memory of tensors that does not come from torch's allocator, while regions are open.

NumPy arrays, buffers and other libraries lend their memory to tensors through a few functions of
torch. Storages that are resized in place, or that are moved to shared memory to send them to
another process, have a new block but are not new. Batches that a data loader has received early are
counted as live, but not as growth.
"""

import functools
import inspect
import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pytest_cka_memory.core.allocations import AllocationGroup
from pytest_cka_memory.core.memory_timeline import Recording
from pytest_cka_memory.meters import torch_keepers, torch_private
from pytest_cka_memory.meters.base import Peaks, Reading
from pytest_cka_memory.meters.blocks import NOT_LIVE
from pytest_cka_memory.meters.blocks.counter import (
    Counter,
    Levels,
    Origin,
    counts_collected,
    prepared_functions,
)
from pytest_cka_memory.meters.objects import storages_in, storages_of
from pytest_cka_memory.meters.patching import (
    Patch,
    PatchGroup,
    SharedPatches,
    Undoable,
    collection_callbacks,
)
from pytest_cka_memory.meters.torch_private import LOADER_ITERATOR

_HOST = torch.device("cpu")


class _Window(weakref.ref[torch.UntypedStorage]):
    """The range of memory that a storage uses."""

    __slots__ = ("address", "identity", "size")

    address: int
    size: int
    identity: int
    """The storage's."""


_windows: dict[int, _Window] = {}
"""By the identity of the storage: one for the process, which has one counter of the CPU."""


def add_window(storage: torch.UntypedStorage, *, is_new: bool) -> None:
    """Count the memory of a storage until it is freed, unless it is of torch's own allocator."""
    # A fake tensor's storage is on another device and has no address.
    if id(storage) in _windows or storage.device != _HOST:
        return
    address, size = storage.data_ptr(), storage.nbytes()
    if not address or not size:
        return
    window = _Window(storage, _remove)
    window.address, window.size, window.identity = address, size, id(storage)
    _windows[id(storage)] = window
    if not prepared_functions().lent_add(address, size, is_new):
        del _windows[id(storage)]


def has_window(storage: torch.UntypedStorage) -> bool:
    """Whether the memory of a storage was lent."""
    return id(storage) in _windows


def remove_window(storage: torch.UntypedStorage) -> None:
    """Count what no other storage uses as freed; do nothing if the memory was not lent."""
    window = _windows.get(id(storage))
    if window is not None:
        _remove(window)


def _remove(window: _Window) -> None:
    if _windows.get(window.identity) is window:
        del _windows[window.identity]
        prepared_functions().lent_remove(window.address, window.size)


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


class LentMemory(SharedPatches):
    """Reports to a counter what other libraries lend to tensors, and which storages are shared."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        torch_private.list_constructors()
        self._counter = counter
        self._made = PatchGroup(())
        """All patches of the last start."""
        self._script_table: object = None
        """What ``torch.jit.script`` knew of torch's functions then."""

    def make_patches(self) -> Sequence[PatchGroup]:
        # A region of an empty test spends a third of its time here if each is made again.
        table, made = torch_private.script_table(), self._made
        if not (made.patches and table is self._script_table and made.fits()):
            self._made, self._script_table = PatchGroup(()), table
            self._made = PatchGroup(list(self.new_patches()))
        return [self._made]

    def undo_patches(self) -> None:
        super().undo_patches()
        if torch_keepers.DYNAMO in sys.modules:  # at each end of a region
            for patch in self._made.patches:
                torch_private.keep_compilable(patch.function)

    def new_patches(self) -> Iterator[Patch]:
        """Yield patches that are not known yet, or do not fit any more."""
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
                add_window(storage, is_new=True)
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
        if origin is not None and not has_window(storage):
            return origin
        # Lent memory may be several blocks.
        return Origin(serial=origin.serial if origin else 0, bytes=storage.nbytes())

    def _move(self, storage: torch.UntypedStorage, origin: Origin) -> None:
        """Take note that a storage is in shared memory now, and no longer where it was."""
        block = self._block_of(storage)
        header_bytes = storage.data_ptr() - block
        self._counter.inherit(block, Origin(origin.serial, origin.bytes + header_bytes))
        remove_window(storage)

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
        self._is_loading = False
        """Whether there was an iterator: to count them takes longer, at each batch boundary."""

    def new_patches(self) -> Iterator[Patch]:
        yield from super().new_patches()
        yield self.patch(torch.UntypedStorage, "resize_", self._emptied.watching)
        if LOADER_ITERATOR is not None:
            yield self.patch(LOADER_ITERATOR, "__next__", self._loading)

    def prefetched_bytes(self) -> int:
        """Return the bytes of batches that data loaders have received but not yielded yet.

        Their number varies by chance, so it must not count as growth.
        """
        if not self._is_loading:
            return 0
        storages = {
            storage.data_ptr(): storage.nbytes() + storage.data_ptr() - self._block_of(storage)
            for iterator in list(self._iterators)
            for batch in torch_keepers.received_early(iterator)
            for storage in storages_in(batch)
        }
        return sum(storages.values())

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            self._iterators.add(iterator)
            self._is_loading = True
            return original(iterator)

        return __next__


class CollectedBlocks(SharedPatches):
    """Informs the counter when the garbage collector runs in a thread, while started."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def make_patches(self) -> Iterable[Undoable]:
        yield from collection_callbacks(self.note_collection)

    def note_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Take note that a collection begins or has ended, as ``gc.callbacks`` describes."""
        self._counter.note_collection(begins=phase == "start")

    def stop(self, user: object) -> None:
        super().stop(user)
        self._counter.note_collection(begins=False)  # an exception may have interrupted the last


class BlockPeaks(Peaks):
    """Counts one region of a device; a subclass makes readings of the counter's levels.

    Args:
        counter: the counter of the device.
        patches: what shows the counter memory that its allocator does not report.
    """

    _collected: CollectedBlocks
    _counts_collected = False

    def __init__(self, counter: Counter, patches: SharedPatches) -> None:
        patches.start(self)  # before the region, which counts what they show
        self._patches = patches
        self._region = counter.open()

    @abstractmethod
    def sampled(self, levels: Levels) -> Reading:
        """Return the reading of a batch boundary, at which the region had these levels."""

    def sample(self) -> tuple[Reading, int, int]:
        levels = self._region.read(sample=True)
        return self.sampled(levels), levels.sample_peak, levels.serial

    def allocations(self) -> Sequence[AllocationGroup]:
        return self._region.at_peak()

    def record(self) -> bool:
        return self._region.record()

    def recorded(self) -> Recording | None:
        return self._region.recorded()

    def count_collected(self) -> bool:
        self._counts_collected = True  # first: an exception may end the next call
        self._collected.start(self)
        return counts_collected()

    def close(self) -> None:
        if self._counts_collected:
            self._collected.stop(self)
        self._region.close()  # before the patches, which show it what is freed until then
        self._patches.stop(self)
