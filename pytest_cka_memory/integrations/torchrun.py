"""Under torchrun: which rank this process is, and how the ranks of a session agree at its end."""

import json
import os
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from pytest_cka_memory.errors import RankError

HURRIED_S = 5.0
"""How long a rank that was told to stop still waits for the others."""
_POLL_S = 0.05
_CHUNK_SIZE = 2**20  # a store takes no more than 8 MiB at once


@dataclass(frozen=True)
class Rank:
    """One process of a job that torchrun started."""

    number: int
    """Counted from 0 over all machines."""
    world: int
    """How many there are."""
    local: int
    """Counted from 0 on this machine."""
    attempt: str
    """How often torchrun has started them again: what an earlier attempt left must not count."""

    @property
    def name(self) -> str:
        """As reports write it."""
        return f"rank {self.number}"


def this_rank(environ: Mapping[str, str] = os.environ) -> Rank | None:
    """Which rank this process is; None outside torchrun, and where there is but one.

    ``RANK`` and ``WORLD_SIZE`` alone say nothing: clusters set them for every process of a job.
    """
    if "TORCHELASTIC_RUN_ID" not in environ or int(environ.get("WORLD_SIZE", "1")) < 2:
        return None
    return Rank(
        number=int(environ["RANK"]),
        world=int(environ["WORLD_SIZE"]),
        local=int(environ["LOCAL_RANK"]),
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


class Store(Protocol):
    """Where ranks leave word for one another: the part of ``torch.distributed.Store`` used here."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""

    def get(self, key: str, /) -> bytes:
        """Read what is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all are there; does not wait."""

    def add(self, key: str, amount: int, /) -> int:
        """Raise a count, which starts at 0; returns it."""


def torchrun_store(rank: Rank) -> Store:
    """Return a board for this session on the store that torchrun itself keeps.

    It needs no process group, is not the tests' own, and outlives a rank that dies.

    Raises:
        RankError: where torchrun shares no store, or it cannot be reached.
    """
    # torch exports both without saying so to type checkers.
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RankError("torchrun shares no store with its ranks; leave its rendezvous at c10d")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        ours = PrefixStore(f"pytest-cka-memory/{rank.attempt}", store)
        session = ours.add(f"sessions of {rank.number}", 1)  # several may follow one another
        board: Store = PrefixStore(f"session {session}", ours)
        return board
    except RuntimeError as error:
        raise RankError(f"the store of torchrun at {host}:{port} cannot be reached") from error


class RankSync:
    """The ranks of one session, each with its word to the others."""

    def __init__(
        self,
        rank: Rank,
        patience_s: float,
        connect: Callable[[Rank], Store] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self.patience_s = patience_s
        """How long another rank may finish no test before it is given up."""
        self._connect = connect or torchrun_store
        self._board: Store | None = None
        self._clock = clock
        self._sleep = sleep

    @property
    def board(self) -> Store:
        """Reached when first needed, for that imports torch; raises RankError if it cannot be."""
        if self._board is None:
            self._board = self._connect(self.rank)
        return self._board

    def hurry(self) -> None:
        """Wait no longer than a moment from now on."""
        self.patience_s = min(self.patience_s, HURRIED_S)

    def beat(self) -> None:
        """Show that this rank gets on."""
        self.board.add(f"beat/{self.rank.number}", 1)

    def say(self, what: str, data: Any) -> None:
        """Leave word: `data` of builtin types, of any size."""
        packed = b64encode(zlib.compress(json.dumps(data).encode(), 1)).decode()
        chunks = [packed[at : at + _CHUNK_SIZE] for at in range(0, len(packed), _CHUNK_SIZE)]
        key = f"{what}/{self.rank.number}"
        for number, chunk in enumerate(chunks):
            self.board.set(f"{key}/{number}", chunk)
        self.board.set(key, str(len(chunks)))  # last: now it can be read

    def hear(self, what: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Wait for the word of each of `ranks`; one that falls silent is not among the answers."""
        heard = {}
        waiting = {rank: (-1, self._clock()) for rank in ranks}
        while waiting:
            for rank, (beats, since) in list(waiting.items()):
                now, beats_now = self._clock(), self.board.add(f"beat/{rank}", 0)
                if self.board.check([f"{what}/{rank}"]):
                    heard[rank] = self._read(f"{what}/{rank}")
                    del waiting[rank]
                elif beats_now != beats:
                    waiting[rank] = (beats_now, now)
                elif now - since >= self.patience_s:
                    del waiting[rank]
            if waiting:
                self._sleep(_POLL_S)
        return heard

    def _read(self, key: str) -> Any:
        count = int(self.board.get(key))
        packed = b"".join(self.board.get(f"{key}/{number}") for number in range(count))
        return json.loads(zlib.decompress(b64decode(packed)))
