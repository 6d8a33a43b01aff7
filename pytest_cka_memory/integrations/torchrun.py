"""torchrun: how the ranks of a session exchange results, and the report when SIGTERM ends one."""

import json
import os
import signal
import threading
import time
import weakref
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pytest_cka_memory.errors import RankError
from pytest_cka_memory.integrations import Rank

SHORT_WAIT_S = 5.0
"""How long a rank that is being stopped still waits for the others."""
_POLL_S = 0.05
_CHUNK_SIZE = 2**20  # a store accepts at most 8 MiB per value


class Store(Protocol):
    """Values that all ranks can read and write: the used part of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value; waits until it exists."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys exist; does not wait."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which starts at 0, and return the sum."""


def torchrun_store(rank: Rank) -> Store:
    """Return a store for this session, part of the store that torchrun itself uses.

    It needs no process group, does not interfere with the groups of tests, and continues to exist
    if a rank ends.

    Raises:
        RankError: if torchrun does not share its store, or the store does not answer.
    """
    # torch exports both names at run time, but does not declare them for type checkers.
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RankError(
            "torchrun does not share its store with the ranks; use --rdzv-backend=c10d, and do not "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        shared = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        attempt = PrefixStore(f"pytest-cka-memory/{rank.attempt}", shared)
        session = attempt.add(f"sessions/{rank.number}", 1)  # a process may run several in turn
        store: Store = PrefixStore(f"session/{session}", attempt)
        return store
    except RuntimeError as error:
        raise RankError(
            f"the store of torchrun at {host}:{port} does not answer; check that torchrun still "
            "runs and that this machine can connect to that port"
        ) from error


class RankSync:
    """Exchange of data among the ranks of one session, through a shared store.

    Each rank publishes its data under a key, and collects what the others published under that
    key. A rank whose heartbeat stops is not waited for longer than the timeout.
    """

    def __init__(
        self,
        rank: Rank,
        timeout_s: float,
        connect: Callable[[Rank], Store] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        """How long to wait for a rank that finishes no test."""
        self._unshortened_s = timeout_s
        self._not_shortened_in: Container[str] = ()
        self._connect = connect or torchrun_store
        self._store: Store | None = None
        self._clock = clock
        self._sleep = sleep

    @property
    def store(self) -> Store:
        """The shared store, connected on first use, because that imports torch.

        Raises:
            RankError: if there is no store.
        """
        if self._store is None:
            self._store = self._connect(self.rank)
        return self._store

    def shorten_wait(
        self, seconds: float = SHORT_WAIT_S, unless_in: Container[str] = frozenset()
    ) -> None:
        """Wait at most a few seconds from now on, also in a wait that is in progress.

        A rank that is in one of the tests `unless_in` is waited for as long as before.
        """
        self._not_shortened_in = unless_in
        self.timeout_s = min(self.timeout_s, seconds)

    def timeout_of(self, rank: int) -> float:
        """Return how long a rank that finishes no test is waited for."""
        is_behind = self._not_shortened_in and self.test_of(rank) in self._not_shortened_in
        return self._unshortened_s if is_behind else self.timeout_s

    def begin(self, test: str) -> None:
        """Show the other ranks in which test this one is."""
        self.store.set(f"test/{self.rank.number}", test)

    def test_of(self, rank: int) -> str | None:
        """Return the test that a rank has begun last, if it is known."""
        key = f"test/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def heartbeat(self) -> None:
        """Show the other ranks that this one makes progress."""
        self.store.add(f"heartbeat/{self.rank.number}", 1)

    def publish(self, key: str, data: Any) -> None:
        """Let the other ranks collect `data`: builtin types, of any size."""
        packed = b64encode(zlib.compress(json.dumps(data).encode(), 1)).decode()
        chunks = [packed[at : at + _CHUNK_SIZE] for at in range(0, len(packed), _CHUNK_SIZE)]
        for number, chunk in enumerate(chunks):
            self.store.set(f"{key}/{self.rank.number}/{number}", chunk)
        # Last, because the others read the chunks as soon as their number is there.
        self.store.set(f"{key}/{self.rank.number}", str(len(chunks)))

    def collect(self, key: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Wait for what each of `ranks` publishes under `key`; the result leaves out hung ranks."""
        collected = {}
        # Rank -> number of its heartbeats, and the time at which that number was first seen.
        waiting = {rank: (-1, self._clock()) for rank in ranks}
        while waiting:
            for rank, (heartbeats, since) in list(waiting.items()):
                now, heartbeats_now = self._clock(), self.store.add(f"heartbeat/{rank}", 0)
                if self.store.check([f"{key}/{rank}"]):
                    collected[rank] = self._read(f"{key}/{rank}")
                    del waiting[rank]
                elif heartbeats_now != heartbeats:
                    waiting[rank] = (heartbeats_now, now)
                elif now - since >= self.timeout_of(rank):
                    del waiting[rank]
            if waiting:
                self._sleep(_POLL_S)
        return collected

    def _read(self, key: str) -> Any:
        count = int(self.store.get(key))
        packed = b"".join(self.store.get(f"{key}/{number}") for number in range(count))
        return json.loads(zlib.decompress(b64decode(packed)))


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
