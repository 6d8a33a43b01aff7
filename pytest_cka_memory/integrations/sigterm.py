"""Being told to stop: torchrun sends SIGTERM to every rank as soon as one has died."""

import os
import signal
import threading
from collections.abc import Callable
from functools import cache


class OnSigterm:
    """Calls a function on SIGTERM, where that would otherwise end the process on the spot."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self, _signal: int, _frame: object) -> None:
        self._function()

    def start(self) -> None:
        """Begin, unless someone else handles SIGTERM, or this thread may not."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self)
            _spare_children()

    def stop(self) -> None:
        """Leave SIGTERM as it was."""
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@cache  # what is registered stays
def _spare_children() -> None:
    """A forked child, such as a DataLoader's worker, ends on SIGTERM as ever."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_restore)


def _restore() -> None:
    if isinstance(signal.getsignal(signal.SIGTERM), OnSigterm):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
