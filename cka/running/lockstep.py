"""Ranks that run a model equally often, if they compute together in its forward pass.

Layers of a sharded model (FSDP, tensor parallel) fetch weights from the other ranks. A rank that
runs it once more than the others would wait forever, e.g. because only its batch has padding, is
large enough, or is not the last one. So before each pass the ranks say whether they need one, and
a rank that does not need it runs along, without its layers being measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from cka.errors import InputError
from cka.running import placement

_DONE, _PASS, _FAILED, _NO_BATCH = range(4)


class Batches(NamedTuple):
    """What the loaders yielded, or the last of it for a rank that has no more."""

    batches: tuple[Any, ...]
    """One batch, or one for each loader."""
    is_own: bool
    """Whether this rank measures it. If not, it only runs along."""


class Lockstep:
    """Agrees with the other ranks about passes; does nothing if no model is sharded."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        """Look whether a model is sharded over ranks."""
        self.is_needed = placement.is_active() and any(map(placement.is_sharded, models))

    def batches(self, own: Iterable[tuple[Any, ...]]) -> Iterator[Batches]:
        """Yield the batches of this rank, and then its last ones until no rank has any left.

        Args:
            own: the batches of this rank.

        Raises:
            InputError: if this rank or another one has no batch at all, or stopped with an error.
        """
        if not self.is_needed:
            for each in own:
                yield Batches(each, is_own=True)
                del each  # otherwise it stays alive while the next one is fetched
            return
        last: tuple[Any, ...] | None = None
        iterator = iter(own)
        while True:
            with self.saying_failures():
                current = next(iterator, None)
            state = _PASS if current is not None else _NO_BATCH if last is None else _DONE
            states = self._exchange(state)
            if _NO_BATCH in states and set(states) != {_NO_BATCH}:
                raise InputError(
                    f"rank {states.index(_NO_BATCH)} has no batch, but the layers of a sharded "
                    "model run on all ranks together; give every rank at least one batch"
                )
            if _PASS not in states:
                return
            last = last if current is None else current
            assert last is not None
            yield Batches(last, is_own=current is not None)

    def of_all(self, names: Iterable[str]) -> set[str]:
        """Return the names that any rank has.

        Raises:
            InputError: if another rank stopped with an error.
        """
        if not self.is_needed:
            return set(names)
        self._exchange(_DONE)
        return set().union(*placement.gather(sorted(names)))

    @contextmanager
    def passes(self, run_along: Callable[[], Any]) -> Iterator[Callable[[], None]]:
        """Yield a function to call before each pass; at the end, run along with other ranks.

        Args:
            run_along: runs the model, for passes that only other ranks need.

        Raises:
            InputError: if another rank stopped with an error.
        """
        if not self.is_needed:
            yield lambda: None
            return

        def announce() -> None:
            self._exchange(_PASS)

        with self.saying_failures():
            yield announce
        while _PASS in self._exchange(_DONE):
            run_along()

    @contextmanager
    def saying_failures(self) -> Iterator[None]:
        """Let the other ranks raise as well, instead of waiting for this one.

        For code between two passes of the model, which the other ranks end at their next one.
        """
        try:
            yield
        except _OtherRankError:
            raise
        except BaseException:
            if self.is_needed:
                placement.all_numbers(_FAILED)
            raise

    def _exchange(self, own: int) -> list[int]:
        states = placement.all_numbers(own)
        if _FAILED in states:
            raise _OtherRankError(
                f"rank {states.index(_FAILED)} stopped with an error; see its message"
            )
        return states


class _OtherRankError(InputError):
    """Another rank stopped with an error, which it has said already."""
