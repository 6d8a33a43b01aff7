"""What explains the growth of a region: found while its loop runs, and at its end.

A loop often frees everything when its function returns. So it is searched for while the loop runs,
again and again until at least half of the growth is explained: what is kept at every tenth step
only may not be there at the first search.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.core.holdings import Holding

_EARLY_BATCHES = 2
"""After so many batches it is noted what is live, to find later what is rebuilt larger."""


class GrowthEvidence:
    """The storages that explain most of the growth of one region.

    Args:
        allocations: returns what was allocated in the region and is live.
    """

    def __init__(self, allocations: Callable[[], Sequence[Allocation]]) -> None:
        self._allocations = allocations
        self._early: list[Allocation] = []
        """What was live after the second batch, without references to it."""
        self._found: tuple[Holding, ...] = ()
        self._growth = 0.0
        """The growth when that was found."""
        self._next = 0
        """The number of batches before which it is not searched again."""

    def boundary(self, ended: int) -> None:
        """Take note of what is live early in the loop; `ended` is the number of batches."""
        if ended == _EARLY_BATCHES:
            self._early = list(self._allocations())

    def may_look(self, ended: int) -> bool:
        """Whether to search now: so seldom that all searches take the time of the last few."""
        return ended >= self._next

    def look(self, holdings: Callable[[], Iterable[Holding]], ended: int, growth: float) -> None:
        """Search if less than half of the growth is explained, and keep what explains more.

        Args:
            holdings: returns what is live now.
            ended: the number of batches that have ended.
            growth: the growth so far, in bytes per batch.
        """
        from pytest_cka_memory.holders.growing import explained_bytes, growing_holdings

        self._next = ended * 5 // 4 + 1
        is_same = self._explains(growth)
        if is_same and 2 * explained_bytes(self._found) >= growth:
            return
        found = growing_holdings(holdings(), self._early, ended - _EARLY_BATCHES)
        explained, before = explained_bytes(found), explained_bytes(self._found)
        if (2 * explained >= growth and not is_same) or explained > before or not self._found:
            self._found = tuple(replace(holding, first_batches=ended) for holding in found)
            self._growth = growth

    def at_end(self, holdings: Iterable[Holding], ended: int, growth: float) -> tuple[Holding, ...]:
        """Return what explains the growth: of what is live now, or of what was found before."""
        from pytest_cka_memory.holders.growing import explained_bytes, growing_holdings

        found = growing_holdings(holdings, self._early, ended - _EARLY_BATCHES)
        earlier = self._found
        if self._explains(growth):
            factor = growth / self._growth if self._growth else 0.0
            earlier = tuple(
                replace(it, bytes_per_batch=(it.bytes_per_batch or 0.0) * factor) for it in earlier
            )
        now, before = (min(growth, explained_bytes(each)) for each in (found, earlier))
        return found if found and now >= before else earlier

    def _explains(self, growth: float) -> bool:
        """Whether `growth` is the one that was explained, computed from other batches."""
        return self._growth / 2 <= growth <= 2 * self._growth
