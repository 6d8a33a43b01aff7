"""Write the report when SIGTERM ends the process, from a thread that waits for the signal."""

import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

_END = b"\0"  # no signal has this number


class SignalThread:
    """Calls a function, in a thread, with the number of each signal that has a handler in Python.

    The C part of Python writes these numbers to a file descriptor as soon as a signal arrives.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._thread: threading.Thread | None = None
        self._pipe: tuple[int, int] | None = None
        """From the C part of Python to the thread."""

    def start(self) -> None:
        """Start the thread, from the main thread, unless it runs or somebody uses the descriptor.

        Only one descriptor can be set for a process; an event loop of asyncio may use it.
        """
        if self._pipe is None:
            pipe = os.pipe()
            os.set_blocking(pipe[1], False)
            before = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
                _close(pipe)
                return
            self._pipe = pipe
            _started.add(self)
            _prepare_forks()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(self._pipe[0],), name="cka-memory-signals", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread and restore the descriptor; does nothing if it was not started."""
        self.pause()
        self.release()

    def pause(self) -> None:
        """End the thread until the next `start`."""
        if self._pipe is None or self._thread in (None, threading.current_thread()):
            return
        with suppress(OSError):
            os.write(self._pipe[1], _END)
        self._thread.join()
        self._thread = None

    def release(self) -> None:
        """Restore the descriptor, which a forked child shares with its parent."""
        if self._pipe is None:
            return
        before = signal.set_wakeup_fd(-1)
        if before != self._pipe[1]:
            signal.set_wakeup_fd(before)
        _close(self._pipe)
        self._thread = self._pipe = None
        _started.discard(self)

    def _run(self, received: int) -> None:
        while (byte := os.read(received, 1)) not in (_END, b""):
            self._on_signal(byte[0])


_started: "weakref.WeakSet[SignalThread]" = weakref.WeakSet()


@cache  # because what is registered cannot be removed
def _prepare_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_pause_if_alone, after_in_child=_release)


def _pause_if_alone() -> None:
    """End the thread before a fork, if the process has no other besides the main thread.

    Since Python 3.12, a fork with threads warns. With a process group, a process has other threads.
    """
    tasks = Path("/proc/self/task")
    with suppress(OSError):
        if len(list(tasks.iterdir())) == 2:
            for thread in _started:
                thread.pause()


def _release() -> None:
    for thread in list(_started):
        thread.release()


def _close(pipe: tuple[int, int]) -> None:
    for end in pipe:
        os.close(end)


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
