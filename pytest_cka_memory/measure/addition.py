"""The interface of what a region measures in addition to its device's memory."""

from collections.abc import Collection
from typing import Any


class Addition:
    """One addition, for one region; it does nothing. It must not keep a tensor alive."""

    def boundary(self) -> None:
        """Measure at a batch boundary."""

    def look(self, garbage: list[Any] | None, serials: Collection[int] = ()) -> None:
        """Look at objects that are garbage at a batch boundary.

        Args:
            garbage: the objects; None if they are not known: then all garbage is about to be
                collected.
            serials: the numbers of the allocations that only they keep alive.
        """

    def finish(self) -> None:
        """Measure when the region's code has ended without an exception, before cleaning."""

    def close(self) -> None:
        """Stop measuring; called once, also after an exception."""

    def fields(self) -> dict[str, Any]:
        """Return fields of the region's record, after cleaning."""
        return {}
