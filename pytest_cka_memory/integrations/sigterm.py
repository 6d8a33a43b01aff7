"""Handle SIGTERM, which torchrun sends to every rank as soon as one has ended with a failure."""

import os
import signal
import threading
from collections.abc import Callable
from functools import cache


class OnSigterm:
    """A handler that calls a function on SIGTERM, which would otherwise end the process at once."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self, _signal: int, _frame: object) -> None:
        self._function()

    def start(self) -> None:
        """Install the handler, unless there is one already or this is not the main thread.

        Python lets only the main thread install signal handlers.
        """
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self)
            _restore_in_children()

    def stop(self) -> None:
        """Restore the default action of SIGTERM."""
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@cache  # because what is registered cannot be removed
def _restore_in_children() -> None:
    """Let forked children, such as workers of a DataLoader, end on SIGTERM as usual."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_restore)


def _restore() -> None:
    if isinstance(signal.getsignal(signal.SIGTERM), OnSigterm):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
