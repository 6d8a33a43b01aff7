"""Patch functions of torch and Python whose effects reach no dispatch mode."""

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.patching import Patch, Undoable
from pytest_cka_memory.meters.storages import interrupts
from pytest_cka_memory.meters.storages.tracing import without_mode

_Call = Callable[..., Any]
_Collection = Callable[[str, Mapping[str, int]], None]
_POOLS = {
    ("concurrent.futures.thread", "ThreadPoolExecutor"): ("submit",),  # asyncio.to_thread too
    ("multiprocessing.pool", "ThreadPool"): ("apply_async", "_map_async", "imap", "imap_unordered"),
}
"""Classes with threads that may be older than a region -> methods that take a function to run."""


class CollectionCallback(Undoable):
    """A callback of the garbage collector."""

    def __init__(self, callback: _Collection) -> None:
        self._callback = callback

    def apply(self) -> None:
        gc.callbacks.append(self._callback)

    def undo(self) -> bool:
        if self._callback in gc.callbacks:  # a test may clear or restore the list
            gc.callbacks.remove(self._callback)
        return True


def resizing(record_storage: Callable[[torch.UntypedStorage], None]) -> Iterator[Patch]:
    """Call `record_storage` before and after a storage is resized in place."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        record_storage(storage)
        result = original(storage, size)
        record_storage(storage)
        return result

    yield Patch(torch.UntypedStorage, "resize_", resize_)


def mapping(record_mapped: Callable[[torch.UntypedStorage], None]) -> Iterator[Patch]:
    """Call `record_mapped` with the storage of each file that torch maps."""
    original: Any = torch.UntypedStorage.from_file

    def from_file(*args: Any, **kwargs: Any) -> torch.UntypedStorage:
        storage: torch.UntypedStorage = original(*args, **kwargs)
        record_mapped(storage)
        return storage

    yield Patch(torch.UntypedStorage, "from_file", staticmethod(from_file))


def threads(run_counted: _Call) -> Iterator[Patch]:
    """Let new threads, and what thread pools are given to run, call their functions by another.

    Args:
        run_counted: is called with a function, which it calls with the other arguments.
    """
    original_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        run = thread.run

        def run_in_mode() -> None:
            # Otherwise the thread and this closure would reference each other. Regions on two
            # devices wrap it twice, so it may be gone already.
            vars(thread).pop("run", None)
            run_counted(run)

        thread.run = run_in_mode  # type: ignore[method-assign]
        original_start(thread)

    yield Patch(threading.Thread, "start", start)
    for (module, kind), methods in _POOLS.items():
        owner = getattr(sys.modules.get(module), kind, None)  # not imported: no threads yet
        for method in methods if owner is not None else ():
            yield Patch(owner, method, _running_by(run_counted, getattr(owner, method)))


def collections(on_collection: _Collection) -> Iterator[Undoable]:
    """Call `on_collection` as ``gc.callbacks`` describes; signals' exceptions in it are raised."""
    yield Patch(sys, "unraisablehook", interrupts.hook_for(on_collection))
    yield CollectionCallback(on_collection)


def tracing(mode_type: type) -> Iterator[Patch]:
    """Hide modes of a type from ``torch.jit`` while it traces."""
    for name in torch_private.TRACERS:
        yield Patch(torch.jit, name, without_mode(getattr(torch.jit, name), mode_type))


def loading(on_next: Callable[[object], None]) -> Iterator[Patch]:
    """Call `on_next` with an iterator over a loader with workers before it yields a batch."""
    iterator = torch_private.LOADER_ITERATOR
    if iterator is not None:
        yield Patch(iterator, "__next__", _calling_before(iterator.__next__, on_next))


def _running_by(run_counted: _Call, original: _Call) -> _Call:
    @functools.wraps(original)
    def method(pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (functools.partial(run_counted, args[0]), *args[1:])
        elif "func" in kwargs:
            kwargs["func"] = functools.partial(run_counted, kwargs["func"])
        return original(pool, *args, **kwargs)

    return method


def _calling_before(
    original: Callable[[Any], Any], call: Callable[[object], None]
) -> Callable[[Any], Any]:
    def __next__(iterator: Any) -> Any:  # noqa: N807
        call(iterator)
        return original(iterator)

    return __next__
