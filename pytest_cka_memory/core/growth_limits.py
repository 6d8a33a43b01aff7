"""The limit on growth per batch, and what it says of tensors on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.garbage import note_on_growth, part_of_message
from pytest_cka_memory.core.growth import MIN_JUDGED_BATCHES, full_batches, growth_bytes_per_batch
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.units import counted, format_exact

_GROWTH = "growth_bytes_per_batch"


@dataclass(frozen=True)
class FlatPerBatch(Limit):
    """Live memory may grow by at most ``tolerance_bytes`` per batch, after ``warmup`` batches."""

    tolerance_bytes: int
    warmup: int
    unit: str = "batch"
    """What is judged in its messages: a batch, or a repeated run of the test."""
    reports_host: ClassVar[bool] = True

    def verdicts(self, record: RegionRecord) -> Sequence[Verdict]:
        """Return the verdict, and what it leaves out: garbage, and tensors on the host."""
        garbage = note_on_growth(record, self.warmup, self.tolerance_bytes)
        left = _left_on_host(record.host_retained)
        return [
            self.judge(record),
            Unjudged(f"{self.text} of garbage", garbage) if garbage else None,
            Unjudged(f"{self.text} on the host", left) if left else None,
        ]

    def judge(self, record: RegionRecord) -> Verdict:
        """Return None or a breach; too few batches are a breach that says how many are missing."""
        growth = growth_bytes_per_batch(record.timeline, self.warmup)
        if growth is None:
            return Breach(self.text, self.tolerance_bytes, None, self._missing(record), _GROWTH)
        if growth <= self.tolerance_bytes:
            return None
        message = (
            f"grew by {format_exact(growth)} per {self.unit} over "
            f"{counted(record.batches, self.unit)}, allowed {format_exact(self.tolerance_bytes)} "
            f"per {self.unit}{part_of_message(record, _GROWTH)}"
        )
        return Breach(self.text, self.tolerance_bytes, growth, message, _GROWTH)

    def _missing(self, record: RegionRecord) -> str:
        if not record.timeline:
            return (
                "cannot be judged because no batch was seen: loop over region.batches(loader), "
                "call region.batch_done() after each batch, or write 'with region.each_step():' "
                "around code that trains with an optimizer"
            )
        needed, seen = self.warmup + MIN_JUDGED_BATCHES, len(full_batches(record.timeline))
        return (
            f"cannot be judged because {counted(seen, 'full batch')} "
            f"{'was' if seen == 1 else 'were'} seen and {needed} are needed "
            f"({self.warmup} to warm up, {MIN_JUDGED_BATCHES} to judge): "
            f"add {needed - seen} more of the same size"
        )


def _left_on_host(groups: Sequence[Holding]) -> str:
    """Return what a line has left in several batches, as a sentence; empty if there is nothing.

    It describes the largest group, with all that the same expression has allocated: the first
    storages of a graph, for example, are held in another way than the others.
    """
    largest = next((group for group in groups if (group.batches or 0) > 1), None)
    if largest is None:
        return ""
    same = [group for group in groups if group.made_at == largest.made_at]
    count, size = sum(group.count for group in same), sum(group.bytes for group in same)
    made = f": made at {largest.made_at}" if largest.created_at else ""
    held = f", held by {largest.held_by}" if largest.held_by else ""
    advice = f"; what to do: {largest.hint}" if largest.hint else ""
    return (
        f"{counted(count, 'tensor')}, {format_exact(size)}, allocated in several batches, are "
        f"retained and not judged{made}{held}{advice}"
    )
