"""The allocator's levels as they were last read, for as long as they are known to be the same."""

from pytest_cka_memory.meters.accelerator.stats import AllocatorStats, Levels
from pytest_cka_memory.meters.blocks.counter import Counter, State


class LastLevels:
    """Reads an allocator's statistics only if a block was allocated or freed since the last time.

    To read them takes longer than all else that an empty region does.
    """

    def __init__(self, stats: AllocatorStats, counter: Counter) -> None:
        self._stats, self._counter = stats, counter
        self._last: tuple[Levels, tuple[int, int]] | None = None

    def read(self) -> Levels:
        """Return the levels now, with the reserve, which falls if the cache is emptied."""
        before = self._counter.figures()
        levels = self._stats.levels()
        is_one_moment = before == self._counter.figures()  # no other thread has allocated meanwhile
        self._last = (levels, _moment(before)) if is_one_moment else None
        return levels

    def known(self) -> Levels:
        """Return the levels now; the reserve may be that of the last reading."""
        last = self._last  # another thread may read meanwhile
        if last is not None and last[1] == _moment(self._counter.figures()):
            return last[0]
        return self.read()


def _moment(state: State) -> tuple[int, int]:
    """Return what differs if a block came or went: while none comes, the level only falls."""
    return state.serial, state.level
