"""Record in a ledger every storage that operators take and return on one device."""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.patching import SharedPatches, Undoable
from pytest_cka_memory.meters.storages import generations, patches
from pytest_cka_memory.meters.storages.ledger import Ledger
from pytest_cka_memory.meters.storages.live_objects import (
    live_storages,
    none_after_collecting,
    storages_of,
)
from pytest_cka_memory.meters.storages.loader_batches import LoaderBatches, may_be_prefetched
from pytest_cka_memory.meters.storages.tracing import is_refused_number, numbers_as_tensors
from pytest_cka_memory.meters.torch_private import TorchDispatchMode
from pytest_cka_memory.meters.torch_versions import FREES_ONLY_OBJECTS

_ALWAYS_NEW = torch.ops.aten.lift_fresh.default  # torch.tensor, torch.from_numpy
_UNPICKLES = torch.ops.aten.set_.source_Storage_storage_offset

T = TypeVar("T")

_NO_TENSORS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


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
        if not owner.counting:  # a thread that outlived the region
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
            if not is_refused_number(error):
                raise
            result = func(*numbers_as_tensors(func, args), **kwargs)
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
        if on != (is_on := self.mode in torch_private.active_modes()):
            if is_on:
                self._remove()
            else:
                torch_private.push_mode(self.mode)

    def _remove(self) -> None:
        """Remove the mode even if a test has left others active, which are above it."""
        active = torch_private.active_modes()
        others = active[active.index(self.mode) + 1 :]
        try:
            for _ in (*others, self.mode):
                torch_private.pop_mode()
        finally:
            for other in others:
                torch_private.push_mode(other)


class StorageTracker(SharedPatches):
    """Keeps a ledger of the storages on one device while any object uses it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.counting = False
        self.counts_unknown_storages = True
        self.ledger = Ledger()
        self._loaders = LoaderBatches()
        self._thread_mode = _ThreadMode(self)

    def start(self, user: object) -> None:
        """Record the live storages, and from now on every new one, until `user` stops or is freed.

        Storages of this thread, and of those started from now on, are recorded at once.
        """
        super().start(user)
        self._thread_mode.switch(on=self._users.in_this_thread())

    def stop(self, user: object) -> None:
        """End what `user` has started; do nothing if it has started nothing."""
        super().stop(user)
        self._thread_mode.switch(on=self._users.in_this_thread())

    def make_patches(self) -> Iterator[Undoable]:
        generations.repair()
        yield _Counting(self)
        yield from patches.resizing(self.record_storage)
        yield from patches.mapping(self.record_mapped)
        yield from patches.threads(self.run_counted)
        yield from patches.collections(self.note_collection)
        yield from patches.tracing(CountingMode)
        yield from patches.loading(self._loaders.add)

    def begin(self) -> None:
        """Record the live storages, and then count."""
        self.ledger = Ledger()
        self._loaders = LoaderBatches()
        self._record_live()
        # That search does not find objects under gc.freeze(), which must not count as new later.
        self.counts_unknown_storages = gc.get_freeze_count() == 0
        self.counting = True

    def end(self) -> None:
        """Stop counting, and forget all storages."""
        self.counting = False
        self.ledger = Ledger()

    def run_counted(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call `function`, and record the storages of its operators in whichever thread it runs."""
        __tracebackhide__ = True
        # A user's patch that is undone after the region puts back a function that calls this.
        if not self.counting or self._is_active_here():
            return function(*args, **kwargs)
        with CountingMode(self):
            return function(*args, **kwargs)

    def _is_active_here(self) -> bool:
        """Whether a mode of this tracker is active in this thread."""
        return torch_private.KNOWS_MODES and any(
            isinstance(mode, CountingMode) and mode.owner is self
            for mode in torch_private.active_modes()
        )

    def note_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Record young objects before the collector promotes them.

        Later searches cover only the young generations, so otherwise the time of the collection
        would decide which reading is the first to count these objects.
        """
        begins = phase == "start"
        if begins and info["generation"] > 0:
            self.record_unseen(young=True, collecting=True)
        if FREES_ONLY_OBJECTS or self.ledger.counts_collected:
            self.ledger.note_collection(begins=begins)

    def record(self, values: Iterable[Any], *, counted: bool, operator: object = None) -> None:
        """Record the storages of every tensor in `values`, including nested lists and dicts."""
        for value in values:
            if type(value) in _NO_TENSORS:  # isinstance is slow if the answer is no
                continue
            if isinstance(value, torch.Tensor):
                for storage in storages_of(value):
                    if not self.counting or storage.device != self.device:
                        continue
                    if operator is not _UNPICKLES or not may_be_prefetched(storage):
                        self.ledger.record(
                            storage, counted=counted, tensor=value, operator=operator
                        )
            elif isinstance(value, (list, tuple)):
                self.record(value, counted=counted, operator=operator)
            elif isinstance(value, dict):
                self.record(value.values(), counted=counted, operator=operator)

    def record_storage(self, storage: torch.UntypedStorage) -> None:
        """Record one storage, if it is on this device."""
        if self.counting and storage.device == self.device:
            self.ledger.record(storage)

    def record_mapped(self, storage: torch.UntypedStorage) -> None:
        """Record the storage of a mapped file, if it is on this device."""
        if self.counting and storage.device == self.device:
            self.ledger.record_mapped(storage)

    def nothing_is_live(self) -> bool:
        """Whether it is proved that no storage is live, so that a collection could free none.

        The ledger knows those that only C++ holds if an operator has used them. The others do not
        count anyway.
        """
        return self.ledger.is_empty() and none_after_collecting() and self.ledger.is_empty()

    def record_unseen(self, *, young: bool = False, collecting: bool = False) -> None:
        """Record live storages that no operator has shown; with `young`, only recent ones.

        With `collecting`, the garbage collector has interrupted other code.
        """
        if self.counting and self.counts_unknown_storages:
            self._record_live(young=young, collecting=collecting)

    def _record_live(self, *, young: bool = False, collecting: bool = False) -> None:
        with torch_private.no_torch_function():  # the user's modes must not see these calls
            found = live_storages(self.device, young=young)
            # At the end of a region all count, because no later search would find them.
            for storage in self._loaders.yielded(found, collecting=collecting) if young else found:
                self.ledger.record(storage)


class _Counting(Undoable):
    """The counting of a tracker, which begins and ends as a patch is applied and undone."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker

    def apply(self) -> None:
        self._tracker.begin()

    def undo(self) -> bool:
        self._tracker.end()
        return True
