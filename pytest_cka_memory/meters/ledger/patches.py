"""Patch functions of torch and Python, and undo that: their effects reach no dispatch mode."""

import gc
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.ledger import interrupts
from pytest_cka_memory.meters.ledger.tracing import without_mode
from pytest_cka_memory.meters.patching import replaced

_Collection = Callable[[str, Mapping[str, int]], None]


class Patches:
    """Patches for storages that are resized in place, for threads, tracing and collections.

    Args:
        record_storage: called with a storage before and after it is resized.
        on_collection: called by the garbage collector, as ``gc.callbacks`` describes.
        new_mode: returns the dispatch mode in which a new thread runs.
        mode_type: the type of these modes, which ``torch.jit`` must not see.
        on_next: called with an iterator over a loader with workers before it yields a batch.
    """

    def __init__(
        self,
        record_storage: Callable[[torch.UntypedStorage], None],
        on_collection: _Collection,
        new_mode: Callable[[], AbstractContextManager[object]],
        mode_type: type,
        on_next: Callable[[object], None],
    ) -> None:
        self._on_collection = on_collection
        self._active = True
        original_resize = torch.UntypedStorage.resize_
        original_start = threading.Thread.start

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            record_storage(storage)
            result = original_resize(storage, size)
            record_storage(storage)
            return result

        def start(thread: threading.Thread) -> None:
            # A user's patch that is undone after the region puts this function back.
            if not self._active:
                original_start(thread)
                return
            run = thread.run

            def run_in_mode() -> None:
                # Otherwise the thread and this closure would reference each other. Regions on two
                # devices wrap it twice, so it may be gone already.
                vars(thread).pop("run", None)
                with new_mode():
                    run()

            thread.run = run_in_mode  # type: ignore[method-assign]
            original_start(thread)

        self._undo = [
            replaced(torch.UntypedStorage, "resize_", resize_),
            replaced(threading.Thread, "start", start),
            replaced(sys, "unraisablehook", interrupts.hook_for(on_collection)),
            *(
                replaced(torch.jit, name, without_mode(getattr(torch.jit, name), mode_type))
                for name in torch_private.TRACERS
            ),
        ]
        iterator = torch_private.LOADER_ITERATOR
        if iterator is not None:
            self._undo.append(
                replaced(iterator, "__next__", _calling_before(iterator.__next__, on_next))
            )
        gc.callbacks.append(on_collection)

    def undo(self) -> list[Callable[[], bool]]:
        """Undo all patches; return the functions that undo those which a user's patch hides."""
        self._active = False
        if self._on_collection in gc.callbacks:  # a test may clear or restore the list
            gc.callbacks.remove(self._on_collection)
        return [undo for undo in self._undo if not undo()]


def _calling_before(
    original: Callable[[Any], Any], call: Callable[[object], None]
) -> Callable[[Any], Any]:
    def __next__(iterator: Any) -> Any:  # noqa: N807
        call(iterator)
        return original(iterator)

    return __next__
