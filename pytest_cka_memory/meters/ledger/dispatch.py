"""Record in a ledger every storage that operators take and return on one device."""

import gc
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.ledger.ledger import Ledger
from pytest_cka_memory.meters.ledger.live_objects import (
    live_storages,
    none_after_collecting,
    storages_of,
)
from pytest_cka_memory.meters.ledger.loader_batches import LoaderBatches, may_be_prefetched
from pytest_cka_memory.meters.ledger.patches import Patches
from pytest_cka_memory.meters.ledger.tracing import is_refused_number, numbers_as_tensors
from pytest_cka_memory.meters.torch_private import TorchDispatchMode

_ALWAYS_NEW = torch.ops.aten.lift_fresh.default  # torch.tensor, torch.from_numpy
_UNPICKLES = torch.ops.aten.set_.source_Storage_storage_offset

_NO_TENSORS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


class CountingMode(TorchDispatchMode):
    """Records the tensors that every operator of one thread takes and returns."""

    def __init__(self, owner: "StorageTracker") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

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
        owner = self._owner
        if not owner.counting:  # a thread that outlived the region
            return func(*args, **kwargs)
        # A backward pass uses tensors that only the graph held, live since before the region.
        counted = func is _ALWAYS_NEW or (
            owner.counts_unknown_storages and torch_private.graph_task_id() == -1
        )
        owner.record(args, counted=counted)
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

    depth = 0
    mode: CountingMode

    def enter(self, owner: "StorageTracker") -> None:
        if self.depth == 0:
            self.mode = CountingMode(owner)
            self.mode.__enter__()
        self.depth += 1

    def leave(self) -> None:
        if self.depth == 0:
            return  # entered in another thread, where an idle mode remains
        self.depth -= 1
        if self.depth == 0:
            _remove_mode(self.mode)


def _remove_mode(mode: CountingMode) -> None:
    """Exit `mode` even if a test has left other modes active; exiting pops the innermost mode."""
    if not torch_private.KNOWS_MODES:
        mode.__exit__(None, None, None)
        return
    left_on = []
    while (innermost := torch_private.innermost_mode()) not in (mode, None):
        left_on.append(innermost)
        torch_private.pop_mode()
    if innermost is mode:
        mode.__exit__(None, None, None)
    for other in reversed(left_on):
        torch_private.push_mode(other)


class StorageTracker:
    """Keeps a ledger of the storages on one device while started; starts nest."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counting = False
        self.counts_unknown_storages = True
        self.ledger = Ledger()
        self._loaders = LoaderBatches()
        self._depth = 0
        self._thread_mode = _ThreadMode()
        self._patches: Patches
        self._hidden_patches: list[Callable[[], bool]] = []
        """Functions that undo patches which a user's patch hid when their region ended."""

    def start(self) -> None:
        """Record the live storages, and from now on every new one."""
        if self._depth == 0:
            self._begin()
        self._depth += 1  # only now: if the search was interrupted, nothing has started
        self._thread_mode.enter(self)

    def stop(self) -> None:
        """End what the matching :meth:`start` began."""
        self._depth -= 1
        if self._depth == 0:
            self.counting = False
            self._hidden_patches += self._patches.undo()
            self.ledger = Ledger()
        self._thread_mode.leave()

    def _begin(self) -> None:
        self.ledger = Ledger()
        self._loaders = LoaderBatches()
        self._record_live()
        # That search does not find objects under gc.freeze(), which must not count as new later.
        self.counts_unknown_storages = gc.get_freeze_count() == 0
        self.counting = True
        self._hidden_patches = [undo for undo in self._hidden_patches if not undo()]
        self._patches = Patches(
            self.record_storage,
            self.note_collection,
            lambda: CountingMode(self),
            CountingMode,
            self._loaders.add,
        )

    def note_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Record young objects before the collector promotes them.

        Later searches cover only the young generations, so otherwise the time of the collection
        would decide which reading is the first to count these objects.
        """
        begins = phase == "start"
        if begins and info["generation"] > 0:
            self.record_unseen(young=True, collecting=True)
        if torch.__version__ < "2.15":
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
