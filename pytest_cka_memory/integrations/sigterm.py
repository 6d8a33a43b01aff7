"""Handle SIGTERM, which torchrun sends to every rank as soon as one has ended with a failure."""

import os
import signal
import threading
from collections.abc import Callable
from functools import cache

from pytest_cka_memory.integrations.signal_thread import SignalThread

GRACE_S = 3.0
"""How long the main thread may take to return to Python after SIGTERM."""


class OnSigterm:
    """A handler that calls a function on SIGTERM, which would otherwise end the process at once.

    If the main thread is in a call that does not return, it cannot call `function`. Then a thread
    calls `if_blocked`, and the main thread runs no more code of Python until that has returned.
    """

    def __init__(
        self,
        function: Callable[[], None],
        if_blocked: Callable[[], None],
        grace_s: float = GRACE_S,
    ) -> None:
        self._function = function
        self._if_blocked = if_blocked
        self._grace_s = grace_s
        self._handled_by: dict[str, int] = {}
        """The one thread that handles SIGTERM; ``setdefault`` is atomic, also in a handler."""
        self._over = threading.Event()
        self._blocked_call_ended = threading.Event()
        self._thread = SignalThread(self._wait_for_main_thread)

    def __call__(self, _signal: int, _frame: object) -> None:
        if not self._is_ours():
            self._blocked_call_ended.wait()
        self._function()

    def start(self) -> None:
        """Install the handler, unless there is one already or this is not the main thread.

        Python lets only the main thread install signal handlers.
        """
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self)
            _restore_in_children()
        self.resume()

    def resume(self) -> None:
        """Start the thread again, which a fork may have ended."""
        if self._is_installed():
            self._thread.start()

    def stop(self) -> None:
        """Restore the default action of SIGTERM."""
        if self._is_installed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._over.set()
        self._thread.stop()

    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self

    def _wait_for_main_thread(self, number: int) -> None:
        if number != signal.SIGTERM or self._over.wait(self._grace_s):
            return
        if self._is_ours():
            try:
                self._if_blocked()
            finally:
                self._blocked_call_ended.set()

    def _is_ours(self) -> bool:
        """Let this thread handle SIGTERM, unless another does; return whether it does."""
        this = threading.get_ident()
        return self._handled_by.setdefault("thread", this) == this


@cache  # because what is registered cannot be removed
def _restore_in_children() -> None:
    """Let forked children, such as workers of a DataLoader, end on SIGTERM as usual."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_restore)


def _restore() -> None:
    if isinstance(signal.getsignal(signal.SIGTERM), OnSigterm):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
