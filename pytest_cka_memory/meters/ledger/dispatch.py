"""Sees every storage that operators take and return on one device, and keeps their ledger."""

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.ledger import interrupts
from pytest_cka_memory.meters.ledger.ledger import Ledger
from pytest_cka_memory.meters.ledger.live_objects import (
    live_storages,
    none_after_collecting,
    storages_of,
)
from pytest_cka_memory.meters.ledger.tracing import (
    is_refused_number,
    numbers_as_tensors,
    without_mode,
)
from pytest_cka_memory.meters.torch_private import TorchDispatchMode

_BORN_BY_DEFINITION = torch.ops.aten.lift_fresh.default  # torch.tensor, torch.from_numpy
_UNPICKLES = torch.ops.aten.set_.source_Storage_storage_offset

_NO_TENSORS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


class _Mode(TorchDispatchMode):
    """Shows the ledger what every operator of this thread takes and returns."""

    def __init__(self, owner: "StorageTracker") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile; otherwise it would silently run eagerly under a mode."""
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
        # A backward pass brings tensors that only the graph held, alive since before the region.
        born = func is _BORN_BY_DEFINITION or (
            owner.counts_unknown_storages and torch_private.graph_task_id() == -1
        )
        owner.see(args, born=born)
        if kwargs:
            owner.see(kwargs.values(), born=born)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if not is_refused_number(error):
                raise
            result = func(*numbers_as_tensors(func, args), **kwargs)
        owner.see((result,), born=True, operator=func)
        return result


class _Here(threading.local):
    """The mode of one thread: regions of different threads may overlap, modes may not."""

    depth = 0
    mode: _Mode

    def enter(self, owner: "StorageTracker") -> None:
        if self.depth == 0:
            self.mode = _Mode(owner)
            self.mode.__enter__()
        self.depth += 1

    def leave(self) -> None:
        if self.depth == 0:
            return  # entered in another thread, where an idle mode stays
        self.depth -= 1
        if self.depth == 0:
            _take_off(self.mode)


def _take_off(mode: _Mode) -> None:
    """Exit `mode` from under those that a test has left on: to exit is to pop the innermost."""
    if not torch_private.TELLS_MODES:
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
    """A ledger of the storages on one device, kept while started; starts nest."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counting = False
        self.counts_unknown_storages = True
        self.ledger = Ledger()
        self._depth = 0
        self._here = _Here()
        self._patches: _Patches
        self._covered: list[Callable[[], bool]] = []
        """What undoes patches that a user's patch hid when their region ended."""

    def start(self) -> None:
        """Book what is alive, and from now on what is born."""
        if self._depth == 0:
            self._begin()
        self._depth += 1  # not before: a walk that was interrupted has begun nothing
        self._here.enter(self)

    def stop(self) -> None:
        """End what the matching :meth:`start` began."""
        self._depth -= 1
        if self._depth == 0:
            self.counting = False
            self._covered += self._patches.undo()
            self.ledger = Ledger()
        self._here.leave()

    def _begin(self) -> None:
        self.ledger = Ledger()
        self._book_living()
        # Objects under gc.freeze() are hidden from that walk; better blind than to blame them.
        self.counts_unknown_storages = gc.get_freeze_count() == 0
        self.counting = True
        self._covered = [undo for undo in self._covered if not undo()]
        self._patches = _Patches(self)

    def note_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Look at what is about to grow old, where no walk over the young would meet it again.

        When the garbage collector runs would else decide which reading is the first to count it.
        """
        begins = phase == "start"
        if begins and info["generation"] > 0:
            self.find_unseen(young=True)
        if torch.__version__ < "2.15":
            self.ledger.note_collection(begins=begins)

    def see(self, values: Iterable[Any], *, born: bool, operator: object = None) -> None:
        """Book the storages of every tensor in `values`, lists and dicts included."""
        for value in values:
            if type(value) in _NO_TENSORS:  # isinstance takes its time to say no
                continue
            if isinstance(value, torch.Tensor):
                for storage in storages_of(value):
                    if not self.counting or storage.device != self.device:
                        continue
                    if operator is not _UNPICKLES or not _may_wait(storage):
                        self.ledger.book(storage, born=born, tensor=value, operator=operator)
            elif isinstance(value, (list, tuple)):
                self.see(value, born=born, operator=operator)
            elif isinstance(value, dict):
                self.see(value.values(), born=born, operator=operator)

    def see_storage(self, storage: torch.UntypedStorage) -> None:
        """Book one storage, if it lies on this device."""
        if self.counting and storage.device == self.device:
            self.ledger.book(storage)

    def nothing_lives(self) -> bool:
        """Whether it is proved that no storage is alive, and so none that a collection could free.

        The ledger tells of those that only C++ holds, as far as an operator has shown them. Others
        weigh nothing, alive or not.
        """
        return self.ledger.is_empty() and none_after_collecting() and self.ledger.is_empty()

    def find_unseen(self, *, young: bool = False) -> None:
        """Book what is alive and was shown by no operator; with `young`, only what is recent."""
        if self.counting and self.counts_unknown_storages:
            self._book_living(young=young)

    def _book_living(self, *, young: bool = False) -> None:
        with torch_private.no_torch_function():  # a mode of the user's is not to see our questions
            for storage in live_storages(self.device, young=young):
                if not (young and _may_wait(storage)):
                    self.ledger.book(storage)


def _may_wait(storage: torch.UntypedStorage) -> bool:
    """Whether `storage` may be a batch that a DataLoader's worker has delivered ahead.

    How many of these wait is chance, and would read as growth. They count from the first operator
    that uses them, or from the full walk at the end.
    """
    return storage.device.type == "cpu" and storage.is_shared()  # on CUDA, all say they are


class _Patches:
    """See what no dispatch mode sees: storages resized in place, threads, and collections."""

    def __init__(self, watch: StorageTracker) -> None:
        self._watch = watch
        self._active = True
        plain_resize = torch.UntypedStorage.resize_
        plain_start = threading.Thread.start

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            watch.see_storage(storage)
            result = plain_resize(storage, size)
            watch.see_storage(storage)
            return result

        def start(thread: threading.Thread) -> None:
            if not self._active:  # a user's patch, undone after the region, has put this back
                plain_start(thread)
                return
            run = thread.run

            def watched_run() -> None:
                del thread.run  # or the thread and this closure would hold each other
                with _Mode(watch):
                    run()

            thread.run = watched_run  # type: ignore[method-assign]
            plain_start(thread)

        self._undo = [
            replaced(torch.UntypedStorage, "resize_", resize_),
            replaced(threading.Thread, "start", start),
            replaced(sys, "unraisablehook", interrupts.hook_for(watch.note_collection)),
            *(
                replaced(torch.jit, name, without_mode(getattr(torch.jit, name), _Mode))
                for name in torch_private.TRACERS
            ),
        ]
        gc.callbacks.append(watch.note_collection)

    def undo(self) -> list[Callable[[], bool]]:
        """Put back what was there; returns what undoes the rest, which a user's patch hides."""
        self._active = False
        if self._watch.note_collection in gc.callbacks:  # a test may clear or restore the list
            gc.callbacks.remove(self._watch.note_collection)
        return [undo for undo in self._undo if not undo()]


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], bool]:
    """Put `function` in the place of an attribute; returns what puts back the one of before.

    That tells whether it could: where someone has patched over us, it is theirs to undo first.
    """
    before = vars(owner).get(name)  # None where it is inherited
    setattr(owner, name, function)

    def undo() -> bool:
        if vars(owner).get(name) is not function:
            return False
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
        return True

    return undo
