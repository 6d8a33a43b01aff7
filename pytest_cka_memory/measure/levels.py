"""The levels at batch boundaries so far, and whether a later one has risen above them."""

from collections import Counter, deque
from collections.abc import Sequence

_LONGEST_PERIOD = 12
"""Levels that repeat after more batches than this are not recognised as such."""


class Levels:
    """The levels after batches of one size, as far as they are known."""

    def __init__(self) -> None:
        self.count = 0
        """How many batches of this size there were."""
        self.rhythm: tuple[int, int] | None = None
        """See :func:`rhythm`; None if it has not been determined."""
        self._highest: deque[tuple[int, int]] = deque()
        """(number, level): levels that no later one exceeds, so they fall from left to right."""

    def note(self, level: int) -> None:
        """Take note that the level of the last batch is at most this."""
        while self._highest and self._highest[-1][1] <= level:
            self._highest.pop()
        self._highest.append((self.count, level))

    def limit(self, most: int) -> None:
        """Lower all levels to `most`."""
        self._highest = deque((number, min(level, most)) for number, level in self._highest)

    def are_below(self, level: int) -> bool:
        """Whether those of the last quarter of the batches, or the last, are below `level`."""
        first = self.count - max(2, self.count // 4)
        while len(self._highest) > 1 and self._highest[0][0] < first:
            self._highest.popleft()
        return bool(self._highest) and self._highest[0][1] < level


def rhythm(levels: Sequence[int]) -> tuple[int, int]:
    """Return the period of the levels in batches, and the number of the highest in the last one.

    Levels have a period if nearly all differ by the same number of bytes from the level one period
    before. Some may be too high, because they include garbage. Without a period the result is 1, 0.
    """
    count = len(levels)
    for period in range(1, _LONGEST_PERIOD + 1):
        compared = range(max(period, count - 2 * _LONGEST_PERIOD), count)
        rises = Counter(levels[place] - levels[place - period] for place in compared)
        for rise, times in rises.most_common(1):
            if 4 * times >= 3 * len(compared):
                last = range(count - period, count)
                highest = max(last, key=lambda place: levels[place] * period - place * rise)
                return period, highest + 1
    return 1, 0
