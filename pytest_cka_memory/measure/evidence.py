"""What is found while a region runs, because at its end it may be gone.

Garbage in reference cycles is described as code (`FoundGarbage`); what grows is traced to its
holders while it is there (`GrowthEvidence`). A region has both, with the samples of its batch
boundaries, in a `LoopEvidence`.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.retention import GROWTH_ON_HOST, Holding
from pytest_cka_memory.measure.additions import Addition
from pytest_cka_memory.measure.batches import BatchSamples
from pytest_cka_memory.measure.census import Beginning
from pytest_cka_memory.meters.base import GarbageCounter, Meter, Peaks


class Explainer(Protocol):
    """Decides which figures of a region are explained while its objects still exist."""

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        """Return the figures of `record` whose bytes are to be traced to allocation and holder.

        With ``GROWTH_ON_HOST``, also what several batches have left on the host.
        """

    def named_values(self) -> Mapping[str, Any]:
        """Return values that the user knows by name, such as a test's fixtures."""

    @property
    def draws_paths(self) -> bool:
        """Whether the references that lead to what is retained are described one by one."""


@runtime_checkable
class Notifier(Protocol):
    """Shows a line to the user, as an explainer may do."""

    def notify(self, line: str) -> None:
        """Show one line at once."""


class FoundGarbage(Addition):
    """Describes garbage that a census has found.

    To describe all of it each time would take longer than the batches, so it is done whenever there
    is twice as much as before. What was described last is therefore at least half of the most.
    """

    def __init__(self, peaks: Peaks, meter: Meter) -> None:
        self._peaks, self._meter = peaks, meter
        self._most = 0
        self._holdings: tuple[Holding, ...] = ()

    def look(self, garbage: list[Any] | None, serials: Collection[int] = ()) -> None:
        if garbage is None or len(serials) < 2 * self._most:
            return
        allocations = self._meter.allocations_since(self._peaks.mark)
        kept = [each for each in allocations if each.serial in serials]
        if kept:
            # Here, because a region without garbage needs none of it.
            from pytest_cka_memory.holders import cycles

            self._most = len(serials)
            self._holdings = cycles.live_holdings(cycles.described_garbage(garbage, kept))

    def fields(self) -> dict[str, Any]:
        return {"garbage": self._holdings} if self._holdings else {}


def _look_at(
    additions: Sequence[Addition], garbage: list[Any] | None, serials: Collection[int] = ()
) -> None:
    """Let additions look at garbage that a census has found; None before it is collected."""
    for addition in additions:
        addition.look(garbage, serials)


_EARLY_BATCHES = 2
"""After so many batches it is noted what is live, to find later what is rebuilt larger."""


def explains_host(
    figures: Collection[str], survivors: Iterable[Allocation], ends: Sequence[int]
) -> bool:
    """Whether to search for what holds tensors on the host, which takes a while.

    Args:
        figures: those to explain.
        survivors: what is live on the host.
        ends: the serial numbers at which batches have ended.
    """
    if set(figures) - {GROWTH_ON_HOST}:
        return True
    batches = {bisect_left(ends, allocation.serial) for allocation in survivors}
    return GROWTH_ON_HOST in figures and bool(ends) and len(batches) > 1


class GrowthEvidence:
    """The storages that explain most of the growth of one region.

    A loop often frees everything when its function returns. So it is searched for while the loop
    runs, again and again until at least half of the growth is explained: what is kept at every
    tenth step only may not be there at the first search.

    Args:
        allocations: returns what was allocated in the region and is live.
    """

    def __init__(self, allocations: Callable[[], Sequence[Allocation]]) -> None:
        self._allocations = allocations
        self._early: list[Allocation] = []
        """What was live after the second batch, without references to it."""
        self._explanation: tuple[Holding, ...] = ()
        self._growth = 0.0
        """The growth that it explained."""
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
        if is_same and 2 * explained_bytes(self._explanation) >= growth:
            return
        growing_now = growing_holdings(holdings(), self._early, ended - _EARLY_BATCHES)
        explained, before = explained_bytes(growing_now), explained_bytes(self._explanation)
        if (2 * explained >= growth and not is_same) or explained > before or not self._explanation:
            self._explanation = tuple(
                replace(holding, first_batches=ended) for holding in growing_now
            )
            self._growth = growth

    def at_end(self, holdings: Iterable[Holding], ended: int, growth: float) -> tuple[Holding, ...]:
        """Return what explains the growth: of what is live now, or of what was found before."""
        from pytest_cka_memory.holders.growing import explained_bytes, growing_holdings

        now = growing_holdings(holdings, self._early, ended - _EARLY_BATCHES)
        earlier = self._explanation
        if self._explains(growth):
            factor = growth / self._growth if self._growth else 0.0
            earlier = tuple(
                replace(it, bytes_per_batch=(it.bytes_per_batch or 0.0) * factor) for it in earlier
            )
        now_bytes, earlier_bytes = (min(growth, explained_bytes(it)) for it in (now, earlier))
        return now if now and now_bytes >= earlier_bytes else earlier

    def _explains(self, growth: float) -> bool:
        """Whether `growth` is the one that was explained, computed from other batches."""
        return self._growth / 2 <= growth <= 2 * self._growth


class LoopEvidence:
    """What a region finds at its batch boundaries.

    Its parts take longer to make than a region that needs none of them, as most tests, so each is
    made when it is first asked for.

    Args:
        meter: that of the region.
        peaks: those of the region, which has just begun.
        additions: look at garbage that is found.
        is_explained: whether to describe garbage for a message: it is one addition more.
    """

    def __init__(
        self, meter: Meter, peaks: Peaks, additions: list[Addition], is_explained: bool
    ) -> None:
        self._meter, self._peaks, self._additions = meter, peaks, additions
        self._is_explained = is_explained
        self._beginning = Beginning(meter, peaks.mark, partial(_look_at, additions))

    @cached_property
    def samples(self) -> BatchSamples:
        """One at each boundary."""
        return BatchSamples(self._peaks, self.census, partial(_look_at, self._additions, None))

    @cached_property
    def census(self) -> GarbageCounter | None:
        """What counts garbage in reference cycles; None if it cannot be counted."""
        if self._is_explained:
            self._additions.append(FoundGarbage(self._peaks, self._meter))
        return self._beginning.census

    @cached_property
    def growth(self) -> GrowthEvidence:
        """What explains growth."""
        return GrowthEvidence(partial(self._meter.allocations_since, self._peaks.mark))

    @property
    def serials(self) -> Sequence[int]:
        """The number of allocations before each boundary."""
        return self.samples.serials if "samples" in vars(self) else ()

    @property
    def freed_garbage(self) -> bool:
        """Whether garbage was freed at boundaries because it could not be counted."""
        return self.samples.freed_garbage if self.serials else False

    def garbage_at_peak(self, peak_bytes: int) -> int | None:
        """Return how much of the region's peak is known to be garbage; None without boundaries."""
        return self.samples.garbage_at_peak(peak_bytes) if self.serials else None

    def end(self) -> None:
        """Correct the samples, when the region's code has ended."""
        if self.serials:
            self.samples.finish()
        self._beginning.end()
