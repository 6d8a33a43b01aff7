"""The CPU has no allocator counters to ask, so every tensor storage is booked, to the byte."""

import gc
import platform
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cka_memory.meters.base import Meter, Reading
from pytest_cka_memory.meters.storages import live_storages, storages_of

_BORN_BY_DEFINITION = torch.ops.aten.lift_fresh.default  # torch.tensor, torch.from_numpy


class _Booked(weakref.ref[torch.UntypedStorage]):
    """A storage in the ledger. Weak: a strong reference here would be the leak we report."""

    __slots__ = ("hidden", "history", "key", "size")

    key: int
    size: int
    hidden: int
    """Bytes it had before the ledger met it too late to count them; they never weigh."""
    history: list[tuple[int, int]]
    """(serial number, weight) of birth and of every change of size since."""

    @property
    def weight(self) -> int:
        return self.history[-1][1]

    def weight_at(self, serial: int) -> int:
        """Bytes this storage weighed when the ledger stood at `serial`; 0 before its birth."""
        return next((weight for when, weight in reversed(self.history) if when <= serial), 0)


class Ledger:
    """Books the birth, growth and death of storages, and the highest level between.

    Births are told by :meth:`book`; deaths tell themselves, through weak references.
    """

    def __init__(self) -> None:
        self.level = 0
        self.peak = 0
        self.serial = 0
        self._live: dict[int, _Booked] = {}
        # Weakref callbacks run at any moment, in any thread: they only append here, lock-free.
        self._dead: deque[_Booked] = deque()
        # Re-entrant: a collection inside book() may run a __del__ that computes with tensors.
        self._lock = threading.RLock()

    def book(self, storage: torch.UntypedStorage, *, born: bool = True) -> None:
        """Book `storage` at its present size, if new or resized.

        ``born=False`` is for one that was alive before the ledger and escaped it: known from now
        on, but weighing nothing, because the start level did not contain it either.
        """
        size = storage.nbytes()
        with self._lock:
            self._bury()
            known = self._live.get(storage._cdata)
            if known is None or known() is not storage:
                if known is not None:  # a dead one, whose address was used again
                    self._forget(known)
                self._enter(storage, 0 if born else size)
            elif known.size != size:
                self._weigh(known, size)

    def retained_since(self, serial: int) -> int:
        """Bytes born, or grown, after `serial` and alive now."""
        with self._lock:
            self._bury()
            return sum(max(0, b.weight - b.weight_at(serial)) for b in self._live.values())

    def settle(self) -> None:
        """Bring :attr:`level` up to date with every death so far."""
        with self._lock:
            self._bury()

    def _enter(self, storage: torch.UntypedStorage, hidden: int) -> None:
        booked = _Booked(storage, self._dead.append)
        booked.key = storage._cdata
        booked.hidden = hidden
        booked.history = [(self.serial, 0)]
        self._live[booked.key] = booked
        self._weigh(booked, storage.nbytes())

    def _weigh(self, booked: _Booked, size: int) -> None:
        before = booked.weight
        booked.size = size
        self.serial += 1
        booked.history.append((self.serial, max(0, size - booked.hidden)))
        self.level += booked.weight - before
        self.peak = max(self.peak, self.level)

    def _bury(self) -> None:
        while self._dead:
            self._forget(self._dead.popleft())

    def _forget(self, booked: _Booked) -> None:
        if self._live.get(booked.key) is booked:
            del self._live[booked.key]
            self.level -= booked.weight


class _Watch(TorchDispatchMode):
    """Shows the ledger what every operator of this thread takes and returns."""

    def __init__(self, meter: "CpuMeter") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

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
        meter = self._meter
        if not meter.counting:  # a thread that outlived the region
            return func(*args, **kwargs)
        born = meter.newcomers_are_born or func is _BORN_BY_DEFINITION
        # A backward pass brings tensors that only the graph held, alive since before the region.
        born = born and torch._C._current_graph_task_id() == -1
        meter.see(args, born=born)
        if kwargs:
            meter.see(kwargs.values(), born=born)
        result = func(*args, **kwargs)
        meter.see((result,), born=True)
        return result


class CpuMeter(Meter):
    """Exact accounting of CPU tensor storages while started.

    The peak is a tensor peak: what an operator allocates and frees inside itself is not seen.
    """

    device = "cpu"
    name = "exact accounting of tensor storages"
    notes = (
        "the peak counts tensors, not temporaries inside one operator (a lower bound);",
        "DataLoader worker processes and what compiled code frees inside itself are not seen",
    )

    def __init__(self) -> None:
        self.device_name = _cpu_name()
        self.counting = False
        self.newcomers_are_born = True
        self._depth = 0
        self._ledger = Ledger()
        self._watch: _Watch
        self._patches: _Patches

    def start(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._ledger = Ledger()
        for storage in live_storages("cpu"):
            self._ledger.book(storage)
        # Objects under gc.freeze() are hidden from that walk; better blind than to blame them.
        self.newcomers_are_born = gc.get_freeze_count() == 0
        self.counting = True
        self._patches = _Patches(self)
        self._watch = _Watch(self)
        self._watch.__enter__()

    def stop(self) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self.counting = False
        self._watch.__exit__(None, None, None)
        self._patches.undo()
        self._ledger = Ledger()

    def see(self, values: Iterable[Any], *, born: bool) -> None:
        """Book the CPU storages of every tensor in `values`, lists and dicts included."""
        for value in values:
            if isinstance(value, torch.Tensor):
                for storage in storages_of(value):
                    self.see_storage(storage, born=born)
            elif isinstance(value, (list, tuple)):
                self.see(value, born=born)
            elif isinstance(value, dict):
                self.see(value.values(), born=born)

    def see_storage(self, storage: torch.UntypedStorage, *, born: bool = True) -> None:
        """Book one storage, if it lies on the CPU."""
        if self.counting and storage.device.type == "cpu":
            self._ledger.book(storage, born=born)

    def clean(self) -> int | None:
        gc.collect()
        if self.counting and self.newcomers_are_born:
            for storage in live_storages("cpu"):  # what no operator has shown us
                self._ledger.book(storage)
        return None

    def read(self) -> Reading:
        self._ledger.settle()
        level = self._ledger.level
        return Reading(allocated_bytes=level, requested_bytes=level, peak_bytes=self._ledger.peak)

    def reset_peak(self) -> None:
        self._ledger.settle()
        self._ledger.peak = self._ledger.level

    def mark(self) -> int:
        return self._ledger.serial

    def retained_since(self, mark: int) -> int:
        return self._ledger.retained_since(mark)


class _Patches:
    """See what no dispatch mode sees: storages resized in place, and threads started from here."""

    def __init__(self, meter: CpuMeter) -> None:
        plain_resize = torch.UntypedStorage.resize_
        plain_start = threading.Thread.start

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            meter.see_storage(storage)
            result = plain_resize(storage, size)
            meter.see_storage(storage)
            return result

        def start(thread: threading.Thread) -> None:
            run = thread.run

            def watched_run() -> None:
                del thread.run  # or the thread and this closure would hold each other
                with _Watch(meter):
                    run()

            thread.run = watched_run  # type: ignore[method-assign]
            plain_start(thread)

        self._start, self._plain_start = start, plain_start
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        threading.Thread.start = start  # type: ignore[method-assign, assignment]

    def undo(self) -> None:
        del torch.UntypedStorage.resize_  # back to the inherited one
        if threading.Thread.start is self._start:  # else someone patched over us: theirs to undo
            threading.Thread.start = self._plain_start  # type: ignore[method-assign]


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine() or "cpu"
