"""When a region needs a garbage collection: rarely, because a full one takes up to a second."""

import gc
from collections.abc import Callable
from gc import collect  # at import, because a test may patch gc.collect


class Garbage:
    """Frees tensors in reference cycles before and after regions, if there may be any.

    Args:
        level: returns the bytes that are live now.
    """

    def __init__(self, level: Callable[[], int]) -> None:
        self._level = level
        self._clean_level = 0
        """The level when there was last no garbage; a process starts without tensors."""
        self._promotions = _promotions()
        """How often objects had become old by then."""
        self._suspected = False
        self._kept = 0
        """Bytes in the clean level that the last region left, which may become garbage later."""

    def suspect(self) -> None:
        """Collect before the next region, because objects were dropped that may be garbage."""
        self._suspected = True

    def note_quiet_moment(self) -> None:
        """Take note of a moment at which a change of the level would not be garbage's."""
        if not self._suspected and self._level() == self._clean_level:
            self._promotions = _promotions()

    def collect_before(self) -> None:
        """Free what is garbage, so that the start level does not include it.

        While the level is the same as when there was last none, there is none. Garbage that arose
        since among objects that are still young is found by a collection of these alone.
        """
        if self.is_possible():
            has_old = self._promotions != _promotions()
            collect(1)
            was_old = self._suspected or self._kept > 0
            if was_old or (has_old and self._level() != self._clean_level):
                collect()
            self._suspected = False
        self._note_clean()

    def is_possible(self) -> bool:
        """Whether there may be garbage now."""
        if self._suspected:
            return True
        # If exactly what the last region left is gone, it has been freed.
        return self._level() != self._clean_level - self._kept

    def collect_after(self, retained: Callable[[], int]) -> None:
        """Free what is garbage if anything that a region has allocated is still live.

        Args:
            retained: returns the bytes of it.
        """
        if not retained():
            return
        collect(1)
        if retained():
            collect()
            self._note_clean()
            self._kept = retained()

    def _note_clean(self) -> None:
        self._clean_level = self._level()
        self._kept = 0
        self._promotions = _promotions()


def _promotions() -> int:
    """Return how often the garbage collector has moved objects into its oldest generation."""
    return sum(int(generation["collections"]) for generation in gc.get_stats()[1:])
