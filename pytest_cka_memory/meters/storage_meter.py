"""The meter for a device whose allocator cannot be counted: it records every storage there.

A dispatch mode sees the operators of the threads that have opened regions. What no operator shows
(compiled code, buffers, gradients) is searched for among live objects at each reading.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from gc import collect  # at import, because a test may patch gc.collect
from typing import Any

import torch

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup
from pytest_cka_memory.meters import objects, torch_private, torch_versions
from pytest_cka_memory.meters.base import Meter, Reading
from pytest_cka_memory.meters.collector import PROMOTED_TOGETHER, has_frozen
from pytest_cka_memory.meters.ledger import Ledger, is_shared_memory
from pytest_cka_memory.meters.objects import live_storages, none_after_collecting, storages_of
from pytest_cka_memory.meters.patching import (
    Patch,
    SharedPatches,
    Undoable,
    collection_callbacks,
)
from pytest_cka_memory.meters.torch_private import (
    TorchDispatchMode,
    active_modes,
    pop_mode,
    push_mode,
)
from pytest_cka_memory.meters.torch_versions import facts_of_operators, processor_name

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
        if func is not _ALWAYS_NEW:
            # A backward pass uses tensors that only the graph held, live since before the region.
            counted = not owner.misses_older and torch_private.graph_task_id() == -1
            owner.record((*args, *kwargs.values()), counted=counted)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            # torch.jit.trace passes numbers for tensors (torch 2.9 to 2.15), which a mode refuses.
            if torch_versions.REFUSED_NUMBER not in str(error):
                raise
            result = func(*_numbers_as_tensors(func, args), **kwargs)
        owner.record((result,), operator=func)
        return result


class StorageTracker(SharedPatches):
    """Keeps a ledger of the storages on one device while any object uses it.

    Args:
        device: the CPU, or an accelerator with its index.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.counting = False
        self.misses_older = False
        """Whether storages that the ledger does not know may be older than the region."""
        self.ledger = Ledger()
        self._mode = CountingMode(self)
        """One for all threads, although their regions may overlap: each has its list of modes."""

    def start(self, user: object) -> None:
        """Record the live storages, and from now on every new one, until `user` stops or is freed.

        Storages of operators in this thread are recorded at once.
        """
        super().start(user)
        self._switch_mode()

    def stop(self, user: object) -> None:
        """End what `user` has started; do nothing if it has started nothing."""
        super().stop(user)
        self._switch_mode()

    def _switch_mode(self) -> None:
        """Activate or end the mode in this thread, whatever an interrupted call has left."""
        # Not by the mode's own methods, which also set flags that an interruption would leave set.
        active = active_modes()
        if self._users.in_this_thread():
            if self._mode not in active:
                push_mode(self._mode)
        elif active[-1:] == [self._mode]:  # below others it stays, and counts nothing
            pop_mode()

    def make_patches(self) -> Iterator[Undoable]:
        yield self  # first: the other patches report to the ledger that it makes
        yield Patch(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))
        yield from collection_callbacks(self.note_collection)
        for name in torch_private.TRACERS:
            yield Patch(torch.jit, name, _without_mode(getattr(torch.jit, name)))

    def apply(self) -> None:
        """Record the live storages, and then count."""
        self.ledger = Ledger()
        with torch_private.no_torch_function():  # the user's modes must not see these calls
            for storage in live_storages(self.device):
                self.ledger.record(storage)
        self.misses_older = has_frozen()  # the search does not see what is frozen
        self.counting = True

    def undo(self) -> bool:
        """Stop counting, and forget all storages."""
        self.counting = False
        self.ledger = Ledger()
        return True

    def note_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Record young objects before the collector promotes them.

        Later searches cover only the young generations, so otherwise the time of the collection
        would decide which reading is the first to count these objects.
        """
        begins = phase == "start"
        if begins and info["generation"] > 0:
            self.record_unseen(young=True)
        self.ledger.note_collection(begins=begins)

    def record(
        self, values: Iterable[Any], *, counted: bool = True, operator: object = None
    ) -> None:
        """Record the storages of every tensor in `values`, including nested lists.

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

    def record_unseen(self, *, young: bool = False) -> None:
        """Record live storages that no operator has shown; with `young`, only recent ones.

        If objects are frozen, what is found may use the memory of a frozen tensor, or be its
        gradient. It is taken to be new if nothing else uses the same memory; nothing is, once the
        region's code has called ``gc.unfreeze()``.
        """
        if not self.counting:
            return
        # What was frozen is then old.
        finds_frozen = not (young and PROMOTED_TOGETHER)
        if self.misses_older and finds_frozen and not has_frozen():
            return
        shared = not self.misses_older
        with torch_private.no_torch_function():
            for storage in live_storages(self.device, young=young, shared=shared):
                # How many batches have arrived from a loader's workers before they are asked for
                # varies by chance and would look like growth, so only an operator makes them count.
                # Nor does a file that torch.load(mmap=True) or safetensors has mapped: each makes a
                # storage of each part of it, which counts, so the file must not count again.
                is_shared = is_shared_memory(storage)
                if not (young and is_shared):
                    self.ledger.record(storage, counted=not is_shared)

    def _resizing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if self.counting and storage.device == self.device:
                self.ledger.record(storage)
            return result

        return resize_


def _without_mode(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ``torch.jit`` that traces code, run without the mode of a region.

    Under any mode, even one that does nothing, code is traced wrongly or not at all.
    """

    @functools.wraps(trace)
    def run(*args: Any, **kwargs: Any) -> Any:
        if [type(mode) for mode in active_modes()[-1:]] != [CountingMode]:
            return trace(*args, **kwargs)
        mode = pop_mode()
        try:
            return trace(*args, **kwargs)
        finally:
            push_mode(mode)

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
        "figures are lower bounds for memory that other threads allocate, for mapped "
        "files, and for batches that DataLoader workers have sent but no operator has used "
        "yet",
    )

    def __init__(self, reason: str = "chosen by hand", device: torch.device = _CPU) -> None:
        self.device = str(device)
        reasons = (f"torch's allocator is not counted: {reason}",)
        self.notes = (*reasons, *self.notes, *torch_private.LOST)
        self.device_name = processor_name()
        self._tracker = StorageTracker(device)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "notes": [*self.notes, *objects.notes()]}

    def conditions(self) -> dict[str, str]:
        return facts_of_operators()

    def start(self) -> None:
        self.start_for(self)

    def stop(self) -> None:
        self.stop_for(self)

    def start_for(self, user: object) -> None:
        self._tracker.start(user)

    def stop_for(self, user: object) -> None:
        self._tracker.stop(user)

    def clean(self) -> int | None:
        # A collection and a search of all objects take most of a region's time, and change nothing
        # if it is proved that no storage is live. The ledger knows those that only C++ holds if an
        # operator has used them; the others do not count anyway.
        is_empty = self._tracker.ledger.is_empty
        if not (is_empty() and none_after_collecting() and is_empty()):
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
