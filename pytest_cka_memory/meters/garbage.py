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
        self._clean_levels = {0}
        """Levels that there were without garbage; a process starts without tensors."""
        self._start_level = 0
        """The level at the start of the last region."""
        self._quiet_level: int | None = None
        """The level at the last quiet moment, without garbage; None if that is not known."""
        self._level_with_garbage = 0
        """The level at that moment, including garbage."""
        self._promotions = _promotions()
        """How often objects had become old when there was last no garbage."""
        self._suspected = False
        self._kept = False
        """Whether the last region left something, which may become garbage later."""

    def suspect(self) -> None:
        """Collect before the next region, because objects were dropped that may be garbage."""
        self._suspected = True

    def note_quiet_moment(self) -> None:
        """Take note of a moment at which a change of the level would not be garbage's.

        It is before the fixtures of a test are set up. If the level is the same as before those of
        the last test, then everything that these two allocated has been freed.
        """
        level = self._level_with_garbage = self._level()
        if self._suspected or level not in {*self._clean_levels, self._quiet_level}:
            self._quiet_level = None
            return
        self._quiet_level = level
        # The next test's fixtures may allocate as much as those of the last test.
        self._note_clean(level, self._start_level)

    def collect_before(self) -> None:
        """Free what is garbage, so that the start level does not include it.

        While the level is the same as when there was last none, there is none. Garbage that arose
        since among objects that are still young is found by a collection of these alone.
        """
        level_with_garbage = self._level()
        if self.is_possible():
            has_old = self._promotions != _promotions()
            collect(1)
            was_old = self._suspected or self._kept
            if was_old or (has_old and self._level() not in self._clean_levels):
                collect()
            self._suspected = False
        self._start_level = self._level()
        if self._quiet_level is None:
            self._quiet_level = self._level_with_garbage - (level_with_garbage - self._start_level)
        self._note_clean(self._start_level)

    def is_possible(self) -> bool:
        """Whether there may be garbage now."""
        return self._suspected or self._level() not in self._clean_levels

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
            kept_bytes = retained()
            # If exactly what the region left is gone, it has been freed.
            self._note_clean(self._level() - kept_bytes)
            self._kept = kept_bytes > 0

    def _note_clean(self, *levels: int) -> None:
        self._clean_levels = set(levels)
        self._kept = False
        self._promotions = _promotions()


def _promotions() -> int:
    """Return how often the garbage collector has moved objects into its oldest generation."""
    return sum(int(generation["collections"]) for generation in gc.get_stats()[1:])
