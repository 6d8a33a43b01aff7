"""What a region's allocator did: its history, and why its reserve is larger than what is in use."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any, Protocol

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.core.reserve import MOST_DESCRIBED, DrawnSegment, ReserveState
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.measure.region_stack import RegionStack
from pytest_cka_memory.meters.base import Meter, Peaks

_RISE = 1.1
"""The reserve is explained again when it has risen by a tenth, so all searches take the time of the
last few."""
OUT_OF_MEMORY = "out of memory"
"""The moment of a refused allocation."""
_FIGURES = {"reserved_increase_bytes", "reserved_growth_bytes_per_batch"}


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
        return not _FIGURES.isdisjoint(figures)

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
