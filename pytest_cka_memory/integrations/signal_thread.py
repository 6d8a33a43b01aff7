"""A thread that learns of a signal while the main thread is in a call that does not return.

Python runs signal handlers in the main thread only, between two of its own instructions. A rank
that waits in a collective is in a call of C++, so its handlers do not run.
"""

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
