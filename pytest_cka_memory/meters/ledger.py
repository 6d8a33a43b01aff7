"""Weak references to the storages of one device, and the bytes of those that are live.

:class:`Ledger` knows when each was allocated, resized and freed, and the highest level so far.
"""

import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cka_memory.core.allocations import (
    Allocation,
    AllocationGroup,
    AllocationSite,
    RawFrames,
    user_frames,
)
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.patching import Locking
from pytest_cka_memory.meters.torch_private import storage_key  # by name: it is called often
from pytest_cka_memory.meters.torch_versions import FREES_ONLY_OBJECTS

_OF_DATA = frozenset(("aten.lift_fresh", "aten.set_.source_Storage"))
"""Operators that take a tensor or storage which no operator has made; its shape may be another."""


class OperatorSite(NamedTuple):
    """What the ledger records at an allocation; made readable only when a report needs it."""

    operator: object
    dtype: torch.dtype
    shape: tuple[int, ...]
    frames: RawFrames

    def readable(self) -> AllocationSite:
        operator = str(self.operator).removesuffix(".default")
        if operator in _OF_DATA:
            return AllocationSite.of_frames(self.frames)
        dtype = str(self.dtype).removeprefix("torch.")
        return AllocationSite.of_frames(
            self.frames, operator=operator, dtype=dtype, shape=self.shape
        )


class Entry(weakref.ref[torch.UntypedStorage]):
    """A storage in the ledger. Weak, because a strong reference would itself be a leak."""

    __slots__ = ("excluded_bytes", "history", "key", "site", "size")

    key: int
    site: OperatorSite | None
    size: int
    excluded_bytes: int
    """Bytes that it had when the ledger found it too late to count them; they never count."""
    history: list[tuple[int, int]]
    """(serial number, weight) of its allocation and of the changes of size since.

    Of several changes without a mark or a peak between them, only the last is here, because a
    storage may be resized any number of times.
    """

    @property
    def weight(self) -> int:
        """How many of its bytes count now."""
        return self.history[-1][1]

    def weight_at(self, serial: int) -> int:
        """Return how many of its bytes counted at `serial`; 0 before its allocation."""
        return next((weight for when, weight in reversed(self.history) if when <= serial), 0)

    def allocation(self, size: int) -> Allocation:
        """Return `size` bytes of it as an allocation."""
        return Allocation(self.key, size, self.history[-1][0], self, self.site)

    def is_live(self, key: int, serial: int) -> bool:
        """Whether the storage has not been freed."""
        return self() is not None

    def is_shared(self, key: int) -> bool:
        """Whether several storages use its memory: that is not known here."""
        return False


def is_shared_memory(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is in memory that processes share."""
    # On CUDA is_shared() is always true.
    return storage.device.type == "cpu" and storage.is_shared()


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's sizes; if they cannot be read, the length of its storage.

    While ``torch.jit`` traces, sizes are tensors, which would be kept alive here and become part of
    the trace. A strided nested tensor has no sizes.
    """
    if not torch_private.is_tracing():
        try:
            return tuple(tensor.shape)
        except RuntimeError:
            pass
    return (tensor.untyped_storage().nbytes() // tensor.element_size(),)


class CollectedBytes:
    """Counts what the garbage collector frees of the storages that were allocated after a mark."""

    def __init__(self, ledger: "Ledger", mark: int) -> None:
        self._ledger, self._mark = ledger, mark
        self._bytes = 0

    def __call__(self) -> int:
        """Return the bytes so far."""
        self._ledger.settle()
        return self._bytes

    def add(self, entry: Entry, sign: int = 1) -> None:
        """Count a storage that a collection has freed; with -1, one that it has not."""
        self._bytes += sign * max(0, entry.weight - entry.weight_at(self._mark))


class Ledger(Locking):
    """Records when storages are allocated, resized and freed, and the highest level so far.

    Callers report allocations to :meth:`record`; weak references report when storages are freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.level = 0
        self.peak = 0
        self.serial = 0
        self._live: dict[int, Entry] = {}
        # Storages that were live at the peak are live now, or are in this list.
        self._peak_serial = 0
        self._last_mark = 0
        self._freed_since_peak: list[Entry] = []
        self._freed: deque[Entry | bool] = deque()
        """Freed storages in order, between the start (True) and the end (False) of collections."""
        self._collecting = False
        self._collected: weakref.WeakSet[CollectedBytes] = weakref.WeakSet()
        """Those who count what collections free."""
        # In torch 2.9, a collection may free only the Python object of a live storage, if that
        # object was part of a cycle, as in torch.save.
        self._maybe_alive: dict[int, tuple[Entry, bool]] = {}
        """By their addresses, with whether each is in shared memory."""
        # Also there, the Python object of a storage shared between processes outlives it.
        self._shared: dict[int, StorageWeakRef] = {}
        # A collection inside settle() may run a __del__ that computes with tensors, because the
        # lock is re-entrant. Its storages wait until the ledger is consistent again.
        self._is_changing = False
        self._waiting: deque[tuple[torch.UntypedStorage, bool, OperatorSite | None]] = deque()

    def record(
        self,
        storage: torch.UntypedStorage,
        *,
        counted: bool = True,
        tensor: torch.Tensor | None = None,
        operator: object = None,
    ) -> None:
        """Record `storage` at its current size, if it is new or resized.

        Args:
            storage: the storage.
            counted: False if its bytes do not count, for example because it was live before the
                ledger started but was not found then: the start level does not contain them.
            tensor: the tensor that an operator returned.
            operator: that operator.
        """
        size = storage.nbytes()
        known = self._live.get(storage_key(storage))
        if known is not None and known.size == size and known() is storage:
            return  # the usual case, so it takes no lock
        site = None
        if operator is not None and tensor is not None:  # now: another thread may do the rest
            site = OperatorSite(operator, tensor.dtype, _shape_of(tensor), user_frames())
        self._waiting.append((storage, counted, site))
        self.settle()

    def settle(self) -> None:
        """Count what was recorded and subtract what was freed so far."""
        with self._lock:
            if self._is_changing:  # a collection has interrupted this, which will go on
                return
            try:
                self._is_changing = True
                self._catch_up()
            finally:
                self._is_changing = False

    def _catch_up(self) -> None:
        # A loop that holds the lock may leave it held after a signal: see tests/test_locks.py.
        self._process_frees()
        while self._waiting:
            self._record(*self._waiting.popleft())
            self._process_frees()

    def _record(
        self, storage: torch.UntypedStorage, counted: bool, site: OperatorSite | None
    ) -> None:
        size, key = storage.nbytes(), storage_key(storage)
        known = self._live.get(key)
        if known is not None and known() is storage:
            if known.size != size:
                self._resize(known, size)
            return
        if known is not None:  # freed, and its address was used again
            self._remove(known)
        maybe_alive, was_shared = self._maybe_alive.pop(key, (None, False))
        if (
            maybe_alive is not None
            and site is None
            and maybe_alive.size == size
            # Otherwise it is another one, such as the next batch of a data loader's worker.
            and is_shared_memory(storage) == was_shared
        ):
            self._restore(maybe_alive, storage)
            return
        # The callback may run at any time in any thread, so it takes no lock.
        entry = Entry(storage, self._freed.append)
        entry.key = key
        entry.site = site
        entry.excluded_bytes = 0 if counted else size
        entry.history = [(self.serial, 0)]
        entry.size = size
        self._live[key] = entry  # complete: a collection may record it again
        if FREES_ONLY_OBJECTS and is_shared_memory(storage):
            self._shared[key] = StorageWeakRef(storage)
        self._resize(entry, size)

    def note_collection(self, *, begins: bool) -> None:
        """Tell apart what a garbage collection frees, if that makes a difference to anyone."""
        if FREES_ONLY_OBJECTS or self._collected:
            self._freed.append(begins)

    def count_collected(self, mark: int) -> CollectedBytes:
        """Count what collections free of what was allocated after `mark`, from now on."""
        counted = CollectedBytes(self, mark)
        self._collected.add(counted)
        return counted

    def mark(self) -> int:
        """Return the current serial number, for the functions that ask for what came after it."""
        with self._lock:
            self._last_mark = self.serial
        return self._last_mark

    def retained_since(self, serial: int) -> int:
        """Return the bytes that were allocated after the mark `serial` and are live now."""
        return sum(max(0, b.weight - b.weight_at(serial)) for b in self._known())

    def is_empty(self) -> bool:
        """Whether no recorded storage is live."""
        return not self._known()

    def allocations_since(self, serial: int) -> list[Allocation]:
        """Return the allocations whose bytes :meth:`retained_since` sums up."""
        grown = ((entry, entry.weight - entry.weight_at(serial)) for entry in self._known())
        return [entry.allocation(size) for entry, size in grown if size > 0]

    def alive_at_peak(self) -> list[AllocationGroup]:
        """Return every storage live at the peak since :meth:`reset_peak`, with its bytes then."""
        with self._lock:
            candidates = self._known() + self._freed_since_peak
        weighed = ((entry, entry.weight_at(self._peak_serial)) for entry in candidates)
        return [AllocationGroup(size, 1, entry.site) for entry, size in weighed if size > 0]

    def reset_peak(self) -> None:
        """Set the peak to the current level."""
        with self._lock:
            self.settle()
            self._note_peak()

    def _known(self) -> list[Entry]:
        """Return every live storage's entry."""
        with self._lock:
            self.settle()
            return list(self._live.values())

    def _resize(self, entry: Entry, size: int) -> None:
        (changed, before), weight = entry.history[-1], max(0, size - entry.excluded_bytes)
        self.serial += 1
        is_peak = self.level + weight - before > self.peak
        is_asked_for = changed <= self._last_mark or (changed <= self._peak_serial and not is_peak)
        if len(entry.history) == 1 or is_asked_for:
            entry.history.append((self.serial, weight))
        else:
            entry.history[-1] = self.serial, weight
        self.level += weight - before
        entry.size = size
        if self.level > self.peak:
            self._note_peak()

    def _note_peak(self) -> None:
        self.peak, self._peak_serial = self.level, self.serial
        self._freed_since_peak.clear()

    def _process_frees(self) -> None:
        while self._freed:
            freed = self._freed[0]
            if isinstance(freed, bool):
                self._collecting = freed
            elif self._live.get(freed.key) is freed:
                was_shared = freed.key in self._shared
                self._remove(freed)
                if self._collecting:
                    if FREES_ONLY_OBJECTS:
                        self._maybe_alive[freed.key] = freed, was_shared
                    for counted in self._collected:
                        counted.add(freed)
            self._freed.popleft()  # only now: a RecursionError may have come
        for key, weak in list(self._shared.items()):
            if weak.expired():
                self._remove(self._live[key])

    def _restore(self, entry: Entry, storage: torch.UntypedStorage) -> None:
        """Continue `entry` with a new Python object for the same storage."""
        again = Entry(storage, self._freed.append)
        for name in Entry.__slots__:
            setattr(again, name, getattr(entry, name))
        self._live[again.key] = again
        for counted in self._collected:
            counted.add(again, -1)
        self._freed_since_peak = [freed for freed in self._freed_since_peak if freed is not entry]
        self.level += again.weight
        if self.level > self.peak:
            self._note_peak()

    def _remove(self, entry: Entry) -> None:
        weight = entry.weight
        if entry.weight_at(self._peak_serial) > 0:
            self._freed_since_peak.append(entry)
        self._shared.pop(entry.key, None)
        # No calls below: each may fail if the stack is exhausted, and would then be repeated.
        self.level -= weight
        del self._live[entry.key]
