"""The meter for a device whose allocator cannot be counted: it records every storage there.

A dispatch mode sees the operators of the threads that have opened regions. What no operator shows
(compiled code, buffers, gradients) is searched for among live objects at each reading.
"""

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from gc import collect  # at import, because a test may patch gc.collect
from typing import Any

import torch

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.meters import collector, objects, torch_private, torch_versions
from pytest_cka_memory.meters.base import Meter, Reading
from pytest_cka_memory.meters.conditions import of_operators, processor_name
from pytest_cka_memory.meters.ledger import Ledger, is_shared_memory
from pytest_cka_memory.meters.objects import live_storages, none_after_collecting, storages_of
from pytest_cka_memory.meters.patching import (
    Patch,
    SharedPatches,
    Undoable,
    collection_callbacks,
)
from pytest_cka_memory.meters.torch_private import TorchDispatchMode

_ALWAYS_NEW = torch.ops.aten.lift_fresh.default  # torch.tensor, torch.from_numpy
_UNPICKLES = torch.ops.aten.set_.source_Storage_storage_offset
_NO_TENSORS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class CountingMode(TorchDispatchMode):
    """Records the tensors that every operator of one thread takes and returns."""

    def __init__(self, owner: "StorageTracker") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile: under other modes it silently runs eagerly."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        owner = self.owner
        if not owner.counting:  # the region of this thread was never closed
            return func(*args, **kwargs)
        # A backward pass uses tensors that only the graph held, live since before the region.
        counted = func is _ALWAYS_NEW or (
            owner.counts_unknown_storages and torch_private.graph_task_id() == -1
        )
        owner.record(args, counted=counted, operator=func if func is _ALWAYS_NEW else None)
        if kwargs:
            owner.record(kwargs.values(), counted=counted)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            # torch.jit.trace passes numbers for tensors (torch 2.9 to 2.15), which a mode refuses.
            if torch_versions.REFUSED_NUMBER not in str(error):
                raise
            result = func(*_numbers_as_tensors(func, args), **kwargs)
        owner.record((result,), counted=True, operator=func)
        return result


class _ThreadMode(threading.local):
    """The mode of each thread: regions of different threads may overlap, modes may not."""

    def __init__(self, owner: "StorageTracker") -> None:
        self.mode = CountingMode(owner)
        self.was_entered = False
        """Used only if this torch version has no list of the active modes."""

    def switch(self, *, on: bool) -> None:
        """Activate or end it in this thread, whatever an interrupted call has left."""
        if not torch_private.KNOWS_MODES:
            if on != self.was_entered:
                self.was_entered = on
                self.mode.__enter__() if on else self.mode.__exit__(None, None, None)
            return
        # Not by the mode's own methods, which also set flags that an interruption would leave set.
        active = torch_private.active_modes()
        if on and self.mode not in active:
            torch_private.push_mode(self.mode)
        elif not on and active[-1:] == [self.mode]:  # below others it stays, and counts nothing
            torch_private.pop_mode()


class StorageTracker(SharedPatches):
    """Keeps a ledger of the storages on one device while any object uses it.

    Args:
        device: the CPU, or an accelerator with its index.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.counting = False
        self.counts_unknown_storages = True
        self.ledger = Ledger()
        self._thread_mode = _ThreadMode(self)

    def start(self, user: object) -> None:
        """Record the live storages, and from now on every new one, until `user` stops or is freed.

        Storages of operators in this thread are recorded at once.
        """
        super().start(user)
        self._thread_mode.switch(on=self._users.in_this_thread())

    def stop(self, user: object) -> None:
        """End what `user` has started; do nothing if it has started nothing."""
        super().stop(user)
        self._thread_mode.switch(on=self._users.in_this_thread())

    def make_patches(self) -> Iterator[Undoable]:
        collector.repair()
        yield _Counting(self)  # first: the other patches report to the ledger that it makes
        yield Patch(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))
        yield Patch(
            torch.UntypedStorage,
            "from_file",
            staticmethod(self._mapping(torch.UntypedStorage.from_file)),
        )
        yield from collection_callbacks(self.note_collection)
        for name in torch_private.TRACERS:
            yield Patch(torch.jit, name, _without_mode(getattr(torch.jit, name)))

    def begin(self) -> None:
        """Record the live storages, and then count."""
        self.ledger = Ledger()
        self._record_live()
        # That search does not find objects under gc.freeze(), which must not count as new later.
        self.counts_unknown_storages = gc.get_freeze_count() == 0
        self.counting = True

    def end(self) -> None:
        """Stop counting, and forget all storages."""
        self.counting = False
        self.ledger = Ledger()

    def note_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Record young objects before the collector promotes them.

        Later searches cover only the young generations, so otherwise the time of the collection
        would decide which reading is the first to count these objects.
        """
        begins = phase == "start"
        if begins and info["generation"] > 0:
            self.record_unseen(young=True)
        if torch_versions.FREES_ONLY_OBJECTS or self.ledger.counts_collected:
            self.ledger.note_collection(begins=begins)

    def record(self, values: Iterable[Any], *, counted: bool, operator: object = None) -> None:
        """Record the storages of every tensor in `values`, including nested lists and dicts.

        Args:
            values: what an operator was called with, or has returned.
            counted: False if storages that the ledger does not know are older than the region.
            operator: the operator if it has returned them, for the site of new storages.
        """
        for value in values:
            if type(value) in _NO_TENSORS:  # isinstance is slow if the answer is no
                continue
            if isinstance(value, torch.Tensor):
                for storage in storages_of(value):
                    if not self.counting or storage.device != self.device:
                        continue
                    # A batch that a loader's worker has sent counts when an operator uses it.
                    if operator is not _UNPICKLES or not is_shared_memory(storage):
                        self.ledger.record(
                            storage, counted=counted, tensor=value, operator=operator
                        )
            elif isinstance(value, (list, tuple)):
                self.record(value, counted=counted, operator=operator)
            elif isinstance(value, dict):
                self.record(value.values(), counted=counted, operator=operator)

    def nothing_is_live(self) -> bool:
        """Whether it is proved that no storage is live, so that a collection could free none.

        The ledger knows those that only C++ holds if an operator has used them. The others do not
        count anyway.
        """
        return self.ledger.is_empty() and none_after_collecting() and self.ledger.is_empty()

    def record_unseen(self, *, young: bool = False) -> None:
        """Record live storages that no operator has shown; with `young`, only recent ones."""
        if self.counting and self.counts_unknown_storages:
            self._record_live(young=young)

    def _record_live(self, *, young: bool = False) -> None:
        with torch_private.no_torch_function():  # the user's modes must not see these calls
            for storage in live_storages(self.device, young=young):
                # How many batches have arrived from a loader's workers before they are asked for
                # varies by chance and would look like growth, so those that no operator has used
                # count only at the end of a region.
                if not (young and is_shared_memory(storage)):
                    self.ledger.record(storage)

    def _record(self, storage: torch.UntypedStorage, *, counted: bool = True) -> None:
        if self.counting and storage.device == self.device:
            self.ledger.record(storage, counted=counted)

    def _resizing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            self._record(storage)
            result = original(storage, size)
            self._record(storage)
            return result

        return resize_

    def _mapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``UntypedStorage.from_file`` so that what it returns does not count.

        torch.load(mmap=True) and safetensors map a file, and make a storage of each part of it.
        These count, so the file must not count again.
        """

        def from_file(*args: Any, **kwargs: Any) -> torch.UntypedStorage:
            storage: torch.UntypedStorage = original(*args, **kwargs)
            self._record(storage, counted=False)
            return storage

        return from_file


class _Counting(Undoable):
    """The counting of a tracker, which begins and ends as a patch is applied and undone."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker

    def apply(self) -> None:
        self._tracker.begin()

    def undo(self) -> bool:
        self._tracker.end()
        return True


def _without_mode(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ``torch.jit`` that traces code, run without the mode of a region.

    Under any mode, even one that does nothing, code is traced wrongly or not at all.
    """

    @functools.wraps(trace)
    def run(*args: Any, **kwargs: Any) -> Any:
        modes = torch_private.active_modes() if torch_private.KNOWS_MODES else []
        if not modes or type(modes[-1]) is not CountingMode:
            return trace(*args, **kwargs)
        mode = torch_private.pop_mode()
        try:
            return trace(*args, **kwargs)
        finally:
            torch_private.push_mode(mode)

    return run


def _numbers_as_tensors(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `args` with a 0-dimensional tensor for each number that is passed for a tensor."""
    schema = torch_private.schema_of(operator)
    wanted = [argument.type.kind() == "TensorType" for argument in schema.arguments]
    with torch_private.no_dispatch():
        return tuple(
            torch.tensor(arg, dtype=_DTYPES[type(arg)]) if tensor and type(arg) in _DTYPES else arg
            for arg, tensor in zip(args, wanted, strict=False)
        )


_CPU = torch.device("cpu")


class StorageMeter(Meter):
    """Counts the bytes of all tensor storages on one device exactly, while started.

    Its peak counts tensors; temporaries that an operator allocates and frees are not counted.

    Args:
        reason: why the allocator is not counted instead; part of the notes.
        device: the CPU, or an accelerator with its index.
    """

    name = "exact accounting of tensor storages"
    notes: tuple[str, ...] = (
        "the peak counts tensors, not temporaries inside one operator (a lower bound)",
        "memory of DataLoader workers and temporaries of compiled code are not counted",
        "memory that several storages share (NumPy, DLPack) counts once for each of them",
        "lower bounds: memory that other threads allocate, mapped files, and batches that workers "
        "of a DataLoader have sent and no operator has used yet",
    )

    def __init__(self, reason: str = "chosen by hand", device: torch.device = _CPU) -> None:
        self.device = str(device)
        self.notes = (f"torch's allocator is not counted: {reason}", *self.notes)
        self.notes = (*self.notes, *torch_private.LOST)
        self.device_name = processor_name()
        self._tracker = StorageTracker(device)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "notes": [*self.notes, *objects.notes()]}

    def conditions(self) -> dict[str, str]:
        return of_operators()

    def start(self) -> None:
        self.start_for(self)

    def stop(self) -> None:
        self.stop_for(self)

    def start_for(self, user: object) -> None:
        self._tracker.start(user)

    def stop_for(self, user: object) -> None:
        self._tracker.stop(user)

    def clean(self) -> int | None:
        # A collection and a search of all objects take most of a region's time.
        if not self._tracker.nothing_is_live():
            collect()
            self._tracker.record_unseen()
        return None

    def read(self) -> Reading:
        # Compiled code, DataLoader workers and buffers create tensors without an operator.
        self._tracker.record_unseen(young=True)
        ledger = self._tracker.ledger
        ledger.settle()
        return Reading(
            allocated_bytes=ledger.level, requested_bytes=ledger.level, peak_bytes=ledger.peak
        )

    def reset_peak(self) -> None:
        self._tracker.ledger.reset_peak()

    def mark(self) -> int:
        return self._tracker.ledger.mark()

    def retained_since(self, mark: int) -> int:
        return self._tracker.ledger.retained_since(mark)

    def count_collected(self, mark: int) -> Callable[[], int] | None:
        return self._tracker.ledger.count_collected(mark)

    def serial(self) -> int:
        return self._tracker.ledger.serial

    def allocations_since(self, mark: int) -> list[Allocation]:
        return self._tracker.ledger.allocations_since(mark)

    def allocations_at_peak(self) -> list[AllocationGroup]:
        return self._tracker.ledger.alive_at_peak()
