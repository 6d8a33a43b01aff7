"""What is found while a region runs, because at its end it may be gone.

Garbage in reference cycles is described as code (`FoundGarbage`); what grows is traced to its
holders while it is there (`GrowthEvidence`). A region has both, with the samples of its batch
boundaries, in a `LoopEvidence`. Why the allocator's reserve is larger than what is in use is found
at its highest moment (`ReserveEvidence`); its history is saved while it records
(`WithRecording`).
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from heapq import nlargest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.reserve import MOST_DESCRIBED, DrawnSegment, ReserveState
from pytest_cka_memory.core.retention import GROWTH_ON_HOST, Holding
from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.measure.additions import Addition
from pytest_cka_memory.measure.batch_samples import BatchSamples
from pytest_cka_memory.measure.census import Beginning
from pytest_cka_memory.measure.region_stack import RegionStack
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


_RISE = 1.1
"""The reserve is explained again when it has risen by a tenth, so all searches take the time of the
last few."""
OUT_OF_MEMORY = "out of memory"
"""The moment of a refused allocation."""
_FIGURES_OF_RESERVE = {"reserved_increase_bytes", "reserved_growth_bytes_per_batch"}


class Search(Protocol):
    """Describes live allocations by what holds them."""

    def __call__(
        self,
        allocations: Iterable[Allocation],
        error: BaseException | None = None,
        keeps: Callable[[Iterable[int]], int] | None = None,
    ) -> tuple[Holding, ...]: ...


class ReserveEvidence:
    """What the reserve of a region consisted of, at the highest moment that was looked at.

    At its end the cache may have been emptied, and what kept the reserve may be gone.

    Args:
        meter: that of the region.
        since: returns the allocations of the region that are live.
    """

    def __init__(self, meter: Meter, since: Callable[[], Sequence[Allocation]]) -> None:
        self._meter, self._since = meter, since
        refused = meter.refused()
        self._refused_before = 0 if refused is None else refused.number
        self._checked_bytes = 0
        self._explained_bytes = 0
        self.fields: dict[str, Any] = {}
        """Fields of the region's record."""

    def note_end(self, survivors: Sequence[Allocation]) -> None:
        """Take note of what was live at the region's end: where it was allocated is known of it."""
        self._since = lambda: survivors

    def is_due(self, reserved_bytes: int | None) -> bool:
        """Whether the reserve is so much higher than at the last check that it is worth another."""
        if not reserved_bytes or reserved_bytes < _RISE * self._checked_bytes:
            return False
        self._checked_bytes = reserved_bytes
        return True

    def is_highest(self) -> bool:
        """Whether the reserve is so much higher than where it was explained that it is worth that.

        Unlike :meth:`is_due`, for a moment after which it cannot be explained any more.
        """
        reserved_bytes = self._meter.read().reserved_bytes
        return bool(reserved_bytes and reserved_bytes >= _RISE * self._explained_bytes)

    def has_risen(self, start_bytes: int | None, peaks: Peaks) -> bool:
        """Whether the reserve was higher in the region than at its start."""
        return start_bytes is not None and (peaks.peak_reserved() or 0) > start_bytes

    def concerns(self, figures: Collection[str]) -> bool:
        """Whether one of `figures` is about the reserve."""
        return not _FIGURES_OF_RESERVE.isdisjoint(figures)

    def look(self, figures: Collection[str], moment: str, search: Search) -> None:
        """Explain the reserve if one of `figures` is about it and it is not lower than before.

        Args:
            figures: those to explain.
            moment: when that is, in words.
            search: describes allocations.
        """
        if not self.concerns(figures):
            return
        reserved_bytes = self._meter.read().reserved_bytes or 0
        if reserved_bytes < self._explained_bytes:
            return
        state = self._meter.reserve()
        if state is not None:
            self._explained_bytes = reserved_bytes
            self._note(state, moment, search)

    def look_at_refusal(self, error: BaseException | None, search: Search, peaks: Peaks) -> bool:
        """Explain the reserve when an allocation was refused, if that has ended the region.

        Args:
            error: the exception; its traceback references what was live.
            search: describes allocations.
            peaks: those of the region, to list what was live.

        Returns:
            Whether there is something to add to the record.
        """
        refused = self._meter.refused()
        if error is None or refused is None or refused.number == self._refused_before:
            return False
        from pytest_cka_memory.holders import groups
        from pytest_cka_memory.meters.torch_versions import is_out_of_memory

        if not is_out_of_memory(error, self._meter.torch_device):
            return False
        self._note(refused.reserve, OUT_OF_MEMORY, partial(search, error=error))
        at_peak = groups.group_by_site(peaks.allocations())
        self.fields |= {"refusal": refused.refusal, "at_peak": at_peak}
        return True

    def _note(self, state: ReserveState, moment: str, search: Search) -> None:
        blocks: set[int] = set()
        for place in nlargest(MOST_DESCRIBED, state.partly_used, key=lambda it: it.free_bytes):
            if len(blocks) > MOST_DESCRIBED:
                break
            blocks.update(place.blocks)
        shown = {block.address for segment in state.drawn for block in segment.blocks} | blocks
        of_region = [it for it in self._since() if it.key in shown] if shown else []
        own = [it for it in of_region if it.key in blocks]
        others = blocks.difference(it.key for it in own)
        older = self._meter.allocations_at(others) if others else ()
        kept_by = search(own, keeps=state.keeps) if own else ()
        if older:
            described = search(older, keeps=state.keeps)
            kept_by += tuple(replace(holding, before_region=True) for holding in described)
        self.fields = {
            "reserve": state.parts,
            "reserve_moment": moment,
            "reserve_kept_by": tuple(sorted(kept_by, key=lambda it: -(it.keeps_bytes or 0))),
            "reserve_segments": _with_lines(state.drawn, of_region),
        }


def _with_lines(
    segments: Sequence[DrawnSegment], own: Sequence[Allocation]
) -> tuple[DrawnSegment, ...]:
    """Return pictures of segments, with the line of each block that is of the region."""
    wanted = {block.address for segment in segments for block in segment.blocks}
    lines: dict[int, str] = {}
    for allocation in own:
        if allocation.key in wanted:
            site = allocation.site
            frames = () if site is None else site.frames
            lines[allocation.key] = frames[0].partition(" in ")[0] if frames else "unknown code"
    return tuple(
        replace(
            segment,
            blocks=tuple(
                replace(block, line=lines.get(block.address, "from before the region"))
                for block in segment.blocks
            ),
        )
        for segment in segments
    )


class WithRecording:
    """A region whose device may record what its allocator does."""

    _stack: RegionStack

    def save_snapshot(self, path: str | Path = "memory_snapshot.pickle") -> Path:
        """Write what torch has recorded of the allocator until now, with the program's lines.

        ``python -m pytest_cka_memory snapshot FILE`` explains the file, and ``replay FILE`` tries
        other settings of the allocator.

        Args:
            path: the file to write.

        Returns:
            The path of the file.

        Raises:
            RegionError: if nothing is being recorded.

        Example:
            .. code-block:: python

                torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
                with cka_memory.measure("step") as region:
                    train(model, batch)
                    region.save_snapshot("step.pickle")
        """
        path = Path(path)
        meter = self._stack.meter
        if not meter.dump_history(path):
            raise RegionError(
                f"cannot write {path}: {meter.device} records no history of allocations; on a CUDA "
                "device run pytest with --cka-memory-snapshots=FOLDER, or call torch.cuda.memory."
                '_record_memory_history(max_entries=1_000_000, stacks="python") first'
            )
        return path
