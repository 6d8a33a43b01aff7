"""Figures that are measured only for regions that ask for them."""

from dataclasses import dataclass
from typing import Annotated

from pytest_cka_memory.core.figure import Figure
from pytest_cka_memory.core.holdings import Holding

CYCLES = "cycles"
"""Memory that only the garbage collector frees."""
ADDITIONS = {
    CYCLES: "memory that only the garbage collector frees",
}
"""What can be measured in addition -> what it is, in a few words."""


@dataclass(frozen=True, kw_only=True)
class AdditionalFigures:
    """Figures of a region that are None, or empty, unless they were asked for."""

    cycle_bytes: Annotated[
        int | None,
        Figure(
            "memory in reference cycles",
            "Allocated inside the region and freed only by the garbage collector, in the region or "
            "at its end; null unless it was asked for.",
            column="cycles",
            legend="freed only by the garbage collector",
            position=10,
            importance=5,
            only_if_known=True,
            never_negative=True,
            explained_by="cycles",
            above_entry=True,
            measured_by=CYCLES,
            unknown_because="what the garbage collector frees is not counted on this device",
            advice="break the cycle: use a weak reference, or delete one of its references before "
            "the objects are dropped",
        ),
    ] = None
    cycles: tuple[Holding, ...] = ()
    """What ``cycle_bytes`` counts, and the reference cycles that have kept it alive."""
