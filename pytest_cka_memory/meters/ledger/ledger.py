"""Books the storages of one kind of device: born, grown, dead, and the highest level between."""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cka_memory.core.allocations import (
    Allocation,
    AllocationSite,
    RawFrames,
    callers,
    written,
)
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.torch_private import storage_key  # by itself: asked for most often


class Origin(NamedTuple):
    """What is noted at a birth, as cheaply as can be; put into words only when asked."""

    operator: object
    dtype: torch.dtype
    shape: tuple[int, ...]
    frames: RawFrames

    def maker(self) -> AllocationSite:
        dtype = str(self.dtype).removeprefix("torch.")
        operator = str(self.operator).removesuffix(".default")
        return AllocationSite(operator, dtype, self.shape, written(self.frames))


class _Booked(weakref.ref[torch.UntypedStorage]):
    """A storage in the ledger. Weak: a strong reference here would be the leak we report."""

    __slots__ = ("doubtful", "hidden", "history", "key", "origin", "size")

    key: int
    origin: Origin | None
    size: int
    hidden: int
    """Bytes it had before the ledger met it too late to count them; they never weigh."""
    history: list[tuple[int, int]]
    """(serial number, weight) of birth and of every change of size since."""
    doubtful: bool
    """Whether it died in a collection, and perhaps its Python object only."""

    @property
    def weight(self) -> int:
        return self.history[-1][1]

    def weight_at(self, serial: int) -> int:
        """Bytes this storage weighed when the ledger stood at `serial`; 0 before its birth."""
        return next((weight for when, weight in reversed(self.history) if when <= serial), 0)

    def birth(self, size: int) -> Allocation:
        """Tell of `size` bytes of it."""
        return Allocation(self, self.key, size, self.history[-1][0], self.origin)


class Ledger:
    """Books the birth, growth and death of storages, and the highest level between.

    Births are told by :meth:`book`; deaths tell themselves, through weak references.
    """

    def __init__(self) -> None:
        self.level = 0
        self.peak = 0
        self.serial = 0
        self._live: dict[int, _Booked] = {}
        # What was alive at the peak is what is alive now and was then, and these.
        self._peak_serial = 0
        self._died_since_peak: list[_Booked] = []
        self._dead: deque[_Booked | bool] = deque()
        """In the order of their deaths, between the begin (True) and end (False) of collections."""
        # Before torch 2.15 the Python object of a storage shared between processes outlives it.
        self._shared: dict[int, tuple[_Booked, StorageWeakRef]] = {}
        # Before torch 2.15, too, a collection may end the Python object of a living storage, where
        # that object was part of a cycle, as in torch.save.
        self._collecting = False
        self._doubtful: dict[int, _Booked] = {}
        # Re-entrant: a collection inside book() may run a __del__ that computes with tensors. What
        # that brings waits, held for this moment only, until the books can be read again.
        self._lock = threading.RLock()
        self._busy = False
        self._waiting: list[tuple[torch.UntypedStorage, bool, torch.Tensor | None, object]] = []

    def book(
        self,
        storage: torch.UntypedStorage,
        *,
        born: bool = True,
        tensor: torch.Tensor | None = None,
        operator: object = None,
    ) -> None:
        """Book `storage` at its present size, if new or resized.

        ``born=False`` is for one that was alive before the ledger and escaped it: known from now
        on, but weighing nothing, because the start level did not contain it either. `tensor` and
        `operator` tell what it was born as and by.
        """
        size = storage.nbytes()
        known = self._live.get(storage_key(storage))
        if known is not None and known.size == size and known() is storage:
            return  # most often; and so without the lock
        with self._lock:
            if self._busy:
                self._waiting.append((storage, born, tensor, operator))
                return
            with self._alone():
                self._book(storage, born, tensor, operator)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the books to oneself, from other threads and from what a collection brings."""
        with self._lock:
            was_busy, self._busy = self._busy, True
            try:
                if not was_busy:
                    self._bury()
                yield
                while self._waiting and not was_busy:
                    self._book(*self._waiting.pop())
            finally:
                self._busy = was_busy

    def _book(
        self,
        storage: torch.UntypedStorage,
        born: bool,
        tensor: torch.Tensor | None,
        operator: object,
    ) -> None:
        size, key = storage.nbytes(), storage_key(storage)
        known = self._live.get(key)
        if known is None or known() is not storage:
            if known is not None:  # a dead one, whose address was used again
                self._bury()
                self._forget(known)
            doubtful = self._doubtful.pop(key, None)
            if operator is None and doubtful is not None and doubtful.size == size:
                self._follow(doubtful, storage)
                return
            origin = None
            if operator is not None and tensor is not None:
                origin = Origin(operator, tensor.dtype, _shape_of(tensor), callers())
            self._enter(storage, key, 0 if born else size, origin)
        elif known.size != size:
            self._weigh(known, size)

    def note_collection(self, *, begins: bool) -> None:
        """Doubt the deaths between the begin and the end of a collection."""
        self._dead.append(begins)

    def retained_since(self, serial: int) -> int:
        """Bytes born, or grown, after `serial` and alive now."""
        self.settle()
        with self._alone():
            return sum(max(0, b.weight - b.weight_at(serial)) for b in self._live.values())

    def settle(self) -> None:
        """Bring :attr:`level` up to date with every death so far."""
        with self._alone():
            if sys.version_info < (3, 11):
                self._bury_untold()

    def is_empty(self) -> bool:
        """Whether nothing that was booked is alive."""
        self.settle()
        return not self._live

    def allocations_since(self, serial: int) -> list[Allocation]:
        """What :meth:`retained_since` sums up, one by one."""
        with self._alone():
            living = list(self._live.values())
        grown = ((booked, booked.weight - booked.weight_at(serial)) for booked in living)
        return [booked.birth(size) for booked, size in grown if size > 0]

    def addresses(self) -> set[int]:
        """Where the memory of every living storage begins."""
        with self._alone():
            storages = [booked() for booked in self._live.values()]
        return {storage.data_ptr() for storage in storages if storage is not None}

    def alive_at_peak(self) -> list[Allocation]:
        """Every storage of the highest level since :meth:`reset_peak`, with its bytes then."""
        with self._alone():
            candidates = [*self._live.values(), *self._died_since_peak]
        weighed = ((booked, booked.weight_at(self._peak_serial)) for booked in candidates)
        return [booked.birth(size) for booked, size in weighed if size > 0]

    def reset_peak(self) -> None:
        """Start the peak anew from the present level."""
        with self._alone():
            self._note_peak()

    def _enter(
        self, storage: torch.UntypedStorage, key: int, hidden: int, origin: Origin | None
    ) -> None:
        booked = _Booked(storage, self._dead.append)  # at any moment, in any thread: so no lock
        booked.doubtful = False
        booked.key = key
        booked.origin = origin
        booked.hidden = hidden
        booked.history = [(self.serial, 0)]
        booked.size = storage.nbytes()
        self._live[booked.key] = booked  # whole: a collection may come, and book it again
        if storage.device.type == "cpu" and storage.is_shared():  # on CUDA, all say they are
            self._shared[booked.key] = booked, StorageWeakRef(storage)
        self._weigh(booked, booked.size)

    def _weigh(self, booked: _Booked, size: int) -> None:
        before, weight = booked.weight, max(0, size - booked.hidden)
        self.serial += 1
        booked.history.append((self.serial, weight))
        self.level += weight - before
        booked.size = size
        if self.level > self.peak:
            self._note_peak()

    def _note_peak(self) -> None:
        self.peak, self._peak_serial = self.level, self.serial
        self._died_since_peak.clear()

    def _bury(self) -> None:
        while self._dead:
            dead = self._dead[0]
            if isinstance(dead, bool):
                self._collecting = dead
            else:
                dead.doubtful = self._collecting
                self._forget(dead)
            self._dead.popleft()  # now: an alarm may have come, or the end of the stack
        for booked, weak in list(self._shared.values()):
            if weak.expired():
                self._forget(booked)

    def _bury_untold(self) -> None:
        """At the end of the stack, Python 3.10 calls nothing to tell a death, not even C code."""
        dead = [booked for booked in self._live.values() if booked() is None]
        self._bury()  # those that were told, with what was told of them
        for booked in dead:
            self._forget(booked)

    def _follow(self, booked: _Booked, storage: torch.UntypedStorage) -> None:
        """Go on with a storage that has lost a Python object, not its life."""
        again = _Booked(storage, self._dead.append)
        for name in _Booked.__slots__:
            setattr(again, name, getattr(booked, name))
        self._live[again.key] = again
        self._died_since_peak = [dead for dead in self._died_since_peak if dead is not booked]
        self.level += again.weight
        if self.level > self.peak:
            self._note_peak()

    def _forget(self, booked: _Booked) -> None:
        if self._live.get(booked.key) is not booked:
            return
        weight = booked.weight
        was_born = booked.history[0][0] < self._peak_serial
        if was_born and booked.weight_at(self._peak_serial) > 0:
            self._died_since_peak.append(booked)
        if booked.doubtful:
            self._doubtful[booked.key] = booked
        self._shared.pop(booked.key, None)
        # No call from here: at the end of the stack each may fail, and is then done anew.
        self.level -= weight
        del self._live[booked.key]


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its sizes as numbers; those of its storage in one dimension where these cannot be had.

    While ``torch.jit`` traces, sizes are tensors, which would be kept here and become part of the
    trace. A nested tensor of the strided layout has none.
    """
    if not torch_private.is_tracing():
        try:
            return tuple(tensor.shape)
        except RuntimeError:
            pass
    return (tensor.untyped_storage().nbytes() // tensor.element_size(),)
