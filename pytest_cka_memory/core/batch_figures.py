"""The samples of a region at batch boundaries, and how much each level grew per batch."""

from dataclasses import dataclass
from typing import Annotated

from pytest_cka_memory.core.figure_rows import (
    DRIVER,
    NO_POOLS,
    OUTSIDE_ADVICE,
    POOLS,
    AdditionalFigures,
    Figure,
)
from pytest_cka_memory.core.growth import Sample, growth_bytes_per_batch
from pytest_cka_memory.core.reserve import POOLS_ADVICE
from pytest_cka_memory.core.reserve_figures import UNEXPLAINED

OTHER_LEVELS = {
    "reserved_growth_bytes_per_batch": "reserved_bytes",
    "outside_growth_bytes_per_batch": "outside_bytes",
    "pools_growth_bytes_per_batch": "pools_bytes",
}
"""Figure of a growth that is not of what is in use -> the attribute of a sample that it judges."""

_SEE = "--cka-memory-html=memory.html --cka-memory-timeline draws when each was live"


@dataclass(frozen=True, kw_only=True)
class BatchFigures(AdditionalFigures):
    """Figures of a region's batches; None with too few of them."""

    timeline: tuple[Sample, ...] = ()
    """One sample per batch boundary."""

    @property
    def batches(
        self,
    ) -> Annotated[
        int,
        Figure(
            "batches",
            "Number of batch boundaries.",
            column="batches",
            position=1,
            importance=2,
            never_negative=True,
            of_device=False,
        ),
    ]:
        """Number of batch boundaries."""
        return len(self.timeline)

    @property
    def growth_bytes_per_batch(
        self,
    ) -> Annotated[
        float | None,
        Figure(
            "growth per batch",
            "Rise of the highest level per batch; null with fewer than five full batches.",
            column="growth/b",
            legend="rise of the highest level per batch, from 5 full batches on",
            position=6,
            importance=5,
            in_baselines=True,
            explained_by="grown",
            advice=_SEE,
        ),
    ]:
        """Growth per batch after one batch of warm-up; see :mod:`pytest_cka_memory.core.growth`."""
        # Most regions have no batches, and this is read several times for each.
        return growth_bytes_per_batch(self.timeline) if self.timeline else None

    @property
    def reserved_growth_bytes_per_batch(
        self,
    ) -> Annotated[
        float | None,
        Figure(
            "growth of the reserve per batch",
            "Rise of the highest reserve per batch; null with fewer than five full batches, and if "
            "the device has no reserve.",
            column="reserved/b",
            legend="rise of the reserve per batch, from 5 full batches on",
            position=8,
            importance=4,
            only_if_not_zero=True,
            advice=UNEXPLAINED,
        ),
    ]:
        """Growth of the reserve at batch boundaries, by the rule of ``growth_bytes_per_batch``."""
        if not self.timeline:
            return None
        return growth_bytes_per_batch(self.timeline, level="reserved_bytes")

    @property
    def outside_growth_bytes_per_batch(
        self,
    ) -> Annotated[
        float | None,
        Figure(
            "growth outside torch's allocator per batch",
            "Rise of the highest level outside torch's allocator per batch; null with fewer than "
            "five full batches.",
            column="outside/b",
            legend="its growth per batch, from 5 full batches on",
            position=14,
            importance=4,
            only_if_not_zero=True,
            measured_by=DRIVER,
            unknown_because="this device has no driver that counts its memory",
            advice=OUTSIDE_ADVICE,
        ),
    ]:
        """Growth outside torch's allocator; see :mod:`pytest_cka_memory.core.growth`."""
        if self.outside_start_bytes is None or not self.timeline:
            return None
        return growth_bytes_per_batch(self.timeline, level="outside_bytes")

    @property
    def pools_growth_bytes_per_batch(
        self,
    ) -> Annotated[
        float | None,
        Figure(
            "growth of private pools per batch",
            "Rise of the highest reserve of private pools per batch; null with fewer than five "
            "full batches.",
            column="pools/b",
            legend="its growth per batch, from 5 full batches on",
            position=16,
            importance=4,
            only_if_not_zero=True,
            explained_by="pools",
            measured_by=POOLS,
            unknown_because=NO_POOLS,
            advice=POOLS_ADVICE,
        ),
    ]:
        """Growth of private pools; see :mod:`pytest_cka_memory.core.growth`."""
        if self.pools_start_bytes is None or not self.timeline:
            return None
        return growth_bytes_per_batch(self.timeline, level="pools_bytes")
