"""Objects that listen to the garbage collector while they live."""

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol


class Listener(Protocol):
    """What can listen to collections."""

    def note(self, phase: str) -> None:
        """Take note that a collection begins or has ended, as ``gc.callbacks`` describes."""


def listen_to_collections(listener: Listener) -> Callable[[str, Mapping[str, int]], None]:
    """Let an object listen while it lives; return what :func:`listen_no_longer` ends."""
    weak = weakref.ref(listener)

    def callback(phase: str, info: Mapping[str, int]) -> None:
        found = weak()
        if found is not None:
            found.note(phase)
        elif callback in gc.callbacks:  # an exception has ended the region
            gc.callbacks.remove(callback)

    gc.callbacks.append(callback)
    return callback


def listen_no_longer(callback: Callable[[str, Mapping[str, int]], None]) -> None:
    """Undo :func:`listen_to_collections`."""
    if callback in gc.callbacks:
        gc.callbacks.remove(callback)
