"""torchrun: how the ranks of a session exchange results."""

import json
import os
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Container, Iterable
from datetime import timedelta
from typing import Any, Protocol

from pytest_cka_memory.errors import RankError
from pytest_cka_memory.integrations.process_roles import Rank

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
