"""Limits on one figure: how high it may be, how fast it may grow, which cards it must fit.

Also what messages say of the memory of processes, which several of these figures contain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytest_cka_memory.core.figure_rows import PROCESS
from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.retention import (
    IN_USE,
    MIN_JUDGED_BATCHES,
    MIN_JUDGED_SAMPLES,
    WORKER,
    Holding,
    ProcessUse,
    full_batches,
    growth_bytes_per_batch,
    steady_growth,
)
from pytest_cka_memory.core.sentences import (
    note_on_growth,
    note_on_older,
    note_on_outside,
    note_on_reserve,
    part_of_message,
)
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.units import counted, format_exact, format_with_unit

_FIGURE = "process_growth_bytes_per_batch"
_COPIED = (
    "keep the data set in an array or tensor instead of a list or dict of Python objects. "
    "The workers grow although they keep nothing, because reading a Python object changes "
    "its reference count, and this copies the memory page of the object"
)
_KEPT = (
    "the workers keep more memory with every item; look in the data set, its transforms and "
    "collate_fn for a list, dict or cache that grows with each item, and limit its length. With "
    "num_workers=0 the test measures the same code in this process, where the marker no_cycles "
    "finds reference cycles too"
)
_EITHER = (
    "set num_workers=0, so that the test measures the same code in this process, which grows only "
    "if the data set keeps something; the workers grow, but this operating system does not report "
    "how much of that is copies of memory shared with this process"
)
_NOT_TORCH = (
    "look for memory outside tensors: lists and dicts of Python objects, NumPy arrays, other "
    "libraries, threads. Python's tracemalloc lists the lines that allocate most of such memory"
)
_TORCH_FREED = (
    "limit the peak with max_peak_mb, which names the lines that allocate most; tensors "
    "used this memory and have been freed since"
)


@dataclass(frozen=True)
class FlatProcess(Limit):
    """Memory of the process and its children may grow by ``tolerance_bytes`` per batch."""

    tolerance_bytes: int
    warmup: int

    @property
    def addition(self) -> str:
        return PROCESS

    def judge(self, record: RegionRecord) -> Verdict:
        """Return None or a breach; too few batches are a breach that says how many are missing."""
        growth = steady_growth(record.process_timeline, self.warmup)
        if growth is None:
            return Breach(self.text, self.tolerance_bytes, None, self._missing(record), _FIGURE)
        if growth <= self.tolerance_bytes:
            return None
        message = (
            f"memory of the process grew by {format_exact(round(growth))} per batch over "
            f"{counted(record.process_timeline[-1].batch, 'batch')}, allowed "
            f"{format_exact(self.tolerance_bytes)} per batch{whose(record)}"
        )
        return Breach(self.text, self.tolerance_bytes, growth, message, _FIGURE)

    def _missing(self, record: RegionRecord) -> str:
        done = sum(sample.workers_done for sample in record.process_timeline)
        few = _too_few(record.batches, "batch", self.warmup, MIN_JUDGED_SAMPLES, done)
        if done:
            return f"{few}: use more batches, fewer workers or a smaller prefetch_factor"
        return (
            f"{few}: loop over region.batches(loader), or call region.batch_done() after each batch"
        )


def _too_few(seen: int, noun: str, warmup: int, judged: int, workers_done: int = 0) -> str:
    """Return how many batches were seen, and how many are needed to judge growth."""
    ahead = f", {workers_done} that the workers fetch ahead" if workers_done else ""
    needed = warmup + judged + workers_done
    return (
        f"cannot be judged because {counted(seen, noun)} {'was' if seen == 1 else 'were'} seen and "
        f"{needed} are needed ({warmup} to warm up, {judged} to judge{ahead})"
    )


def whose(record: RegionRecord) -> str:
    """Return how much of a rise torch's CPU allocator has, as the end of a sentence."""
    rise, of_torch = record.process_increase_bytes, record.process_torch_bytes
    if not rise or rise <= 0 or of_torch is None:
        return ""
    has = format_with_unit(of_torch) if of_torch > 0 else "nothing"
    return f"; torch's CPU allocator took {has} of the rise of {format_with_unit(rise)}"


def lines_about(record: RegionRecord) -> list[str]:
    """Return a line about each process, the one that grew most first, and what to do."""
    ordered = sorted(record.processes, key=_rise, reverse=True)
    lines = [*map(_line_about, ordered), *_line_about_starts(record)]
    advice = _advice(record)
    return [*lines, f"what to do: {advice}"] if advice else lines


def _line_about_starts(record: RegionRecord) -> list[str]:
    """Return a line on the memory of child processes that started in the region, if it is large."""
    rise = record.process_increase_bytes or 0
    started = rise - sum(map(_rise, record.processes))
    if len(record.processes) < 2 or 4 * started < rise:
        return []
    return [
        f"{format_with_unit(started)} of the rise came with the start of the children; the rest "
        "of their memory at the start is shared with other processes"
    ]


def holdings_of(record: RegionRecord) -> tuple[Holding, ...]:
    """Return the tensors that a rise consists of, if most of it is theirs."""
    if not _is_of_torch(record):
        return ()
    return record.retained if record.host_retained_bytes is None else record.host_retained


def _advice(record: RegionRecord) -> str:
    """Return what to do; empty if tensors are the cause, which have advice of their own."""
    workers = [use for use in record.processes if use.name.startswith(WORKER)]
    grown = sum(map(_rise, workers))
    if 2 * grown > sum(max(0, _rise(use)) for use in record.processes):
        if any(use.copied_bytes is None for use in workers):
            return _EITHER
        # Those that were last seen below their highest level have freed what they kept.
        return _COPIED if 2 * sum(use.copied_bytes or 0 for use in workers) > grown else _KEPT
    if _is_of_torch(record):
        return "" if holdings_of(record) else _TORCH_FREED
    if _was_of_torch(record):
        return _TORCH_FREED
    return record.growing_graph or _NOT_TORCH


def _is_of_torch(record: RegionRecord) -> bool:
    of_torch = record.process_torch_bytes or 0
    return of_torch > 0 and 2 * of_torch >= (record.process_increase_bytes or 0)


def _was_of_torch(record: RegionRecord) -> bool:
    """Whether the process has given back most of its rise, and tensors on the host had as much."""
    rise = record.process_increase_bytes or 0
    start, end = record.process_start_bytes, record.process_end_bytes
    if record.host_retained_bytes is not None or start is None or end is None:
        return False
    return 2 * (end - start) < rise <= 2 * record.peak_increase_bytes


def _rise(use: ProcessUse) -> int:
    return use.peak_bytes - use.start_bytes


def _line_about(use: ProcessUse) -> str:
    growth = use.growth_bytes_per_batch
    grew = f"; grew by {format_with_unit(growth)} per batch" if growth else ""
    copied = use.copied_bytes or 0
    is_part = 4 * copied >= max(1, _rise(use))
    copies = f"; {format_with_unit(copied)} of the rise are copied shared pages" if is_part else ""
    return (
        f"{use.name} (pid {use.pid}): {format_with_unit(use.start_bytes)} at the start, at most "
        f"{format_with_unit(use.peak_bytes)}{grew}{copies}"
    )


def _parts_of_level(record: RegionRecord) -> str:
    return (
        f"; it was {format_exact(record.start_bytes)} at the start of the region, which added "
        f"{format_exact(record.peak_increase_bytes)}"
    )


def _parts_outside(record: RegionRecord) -> str:
    start_bytes, peak_bytes = record.outside_start_bytes, record.outside_peak_bytes
    if start_bytes is None or peak_bytes is None:
        return ""
    return (
        f"; it was {format_with_unit(start_bytes)} at entry and {format_with_unit(peak_bytes)} "
        "at its highest, and torch's reserve rose by "
        f"{format_with_unit(record.reserved_increase_bytes or 0)} at most"
    )


def _parts_of_pools(record: RegionRecord) -> str:
    in_use, reserved = record.pools_bytes or 0, record.pools_reserved_bytes or 0
    return (
        f"; of {format_with_unit(reserved)} reserved, at most {format_with_unit(in_use)} was in use"
    )


_PARTS: Mapping[str, Callable[[RegionRecord], str]] = {
    "peak_bytes": _parts_of_level,
    "cycle_bytes": lambda record: "; it stays allocated until the garbage collector runs",
    "process_increase_bytes": whose,
    "outside_increase_bytes": _parts_outside,
    "pools_increase_bytes": _parts_of_pools,
}
"""Figure -> what it consists of, as the end of a message about it."""


@dataclass(frozen=True)
class Maximum(Limit):
    """A figure of the record may be at most ``allowed_bytes``."""

    figure: str
    """Its name in the record: ``retained_bytes``."""
    allowed_bytes: int

    @property
    def addition(self) -> str:
        return FIGURES[self.figure].measured_by

    @property
    def judges_device(self) -> bool:
        return FIGURES[self.figure].of_device

    def judge(self, record: RegionRecord) -> Verdict:
        """Return None, a breach, or why the device cannot be judged."""
        measured = getattr(record, self.figure)
        if measured is None:
            return Unjudged(self.text, FIGURES[self.figure].unknown_because)
        if measured <= self.allowed_bytes:
            return None
        parts = _PARTS[self.figure](record) if self.figure in _PARTS else ""
        message = (
            f"{FIGURES[self.figure].noun} {format_exact(measured)}, "
            f"allowed {format_exact(self.allowed_bytes)}: "
            f"{format_exact(measured - self.allowed_bytes)} too much{parts}"
            f"{part_of_message(record, self.figure)}"
        )
        return Breach(self.text, self.allowed_bytes, measured, message, self.figure)


class Level(NamedTuple):
    """A level whose growth can be limited."""

    figure: str
    """The growth in the record, after one batch of warm-up."""
    sample: str
    """The attribute of a sample."""
    words: str
    """What grows, as the start of a message; empty for what is in use."""


LEVELS = {
    "allocated": Level("growth_bytes_per_batch", IN_USE, ""),
    "reserved": Level("reserved_growth_bytes_per_batch", "reserved_bytes", "the reserve "),
    "pools": Level("pools_growth_bytes_per_batch", "pools_bytes", "the reserve of private pools "),
    "outside": Level(
        "outside_growth_bytes_per_batch",
        "outside_bytes",
        "the card's memory outside torch's allocator ",
    ),
}
"""The argument ``of`` of ``flat_per_batch`` -> what is judged."""


@dataclass(frozen=True)
class FlatPerBatch(Limit):
    """A level may grow by at most ``tolerance_bytes`` per batch, after ``warmup`` batches."""

    tolerance_bytes: int
    warmup: int
    unit: str = "batch"
    """What is judged in its messages: a batch, or a repeated run of the test."""
    of: str = "allocated"
    """Which of :data:`LEVELS`."""
    others: frozenset[str] = frozenset()
    """The levels that other limits of the test judge, so that this one does not mention them."""

    @property
    def reports_host(self) -> bool:
        return self.of == "allocated"

    @property
    def addition(self) -> str:
        return FIGURES[LEVELS[self.of].figure].measured_by

    def verdicts(self, record: RegionRecord) -> Sequence[Verdict]:
        """Return the verdict, and what it leaves out, if that rises."""
        if self.of != "allocated":
            return [self.judge(record)]
        garbage = note_on_growth(record, self.warmup, self.tolerance_bytes)
        left_out = {
            "of garbage": garbage,
            "of older objects": note_on_older(record, self.warmup, self.tolerance_bytes),
            "of the reserve": "reserved" not in self.others
            and note_on_reserve(record, self.warmup),
            "outside the allocator": "outside" not in self.others
            and note_on_outside(record, self.warmup),
            "on the host": _left_on_host(record.host_retained),
        }
        reasons = ((f"{self.text} {what}", reason) for what, reason in left_out.items() if reason)
        return [self.judge(record), *(Unjudged(*each) for each in reasons)]

    def judge(self, record: RegionRecord) -> Verdict:
        """Return None, a breach, or why the device cannot be judged.

        Too few batches are a breach that says how many are missing.
        """
        level = LEVELS[self.of]
        growth = growth_bytes_per_batch(record.timeline, self.warmup, level.sample)
        if growth is None:
            if any(getattr(sample, level.sample) is None for sample in record.timeline):
                return Unjudged(self.text, FIGURES[level.figure].unknown_because)
            return self._breach(None, self._missing(record))
        if growth <= self.tolerance_bytes:
            return None
        message = (
            f"{level.words}grew by {format_exact(growth)} per {self.unit} over "
            f"{counted(record.batches, self.unit)}, allowed {format_exact(self.tolerance_bytes)} "
            f"per {self.unit}{part_of_message(record, level.figure)}{self._beside(record)}"
        )
        return self._breach(growth, message)

    def _beside(self, record: RegionRecord) -> str:
        """Return what grew in use meanwhile, as the end of a message on another level."""
        if self.of == "allocated":
            return ""
        in_use = growth_bytes_per_batch(record.timeline, self.warmup) or 0.0
        return f"; the memory in use grew by {format_with_unit(max(0.0, in_use))} per {self.unit}"

    def _breach(self, growth: float | None, message: str) -> Breach:
        figure = LEVELS[self.of].figure
        return Breach(self.text, self.tolerance_bytes, growth, message, figure, warmup=self.warmup)

    def _missing(self, record: RegionRecord) -> str:
        if not record.timeline:
            return (
                "cannot be judged because no batch was seen: loop over region.batches(loader), "
                "call region.batch_done() after each batch, or write 'with region.each_step():' "
                "around code that trains with an optimizer"
            )
        needed, seen = self.warmup + MIN_JUDGED_BATCHES, len(full_batches(record.timeline))
        few = _too_few(seen, "full batch", self.warmup, MIN_JUDGED_BATCHES)
        return f"{few}: add {needed - seen} more of the same size"


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


@dataclass(frozen=True)
class CardMemory:
    """The memory of one card, in bytes."""

    name: str
    total_bytes: int
    beside_bytes: int
    """What is kept free beside the allocator: the CUDA context, loaded kernels, libraries."""
    seen_bytes: tuple[int, int] = (0, 0)
    """The least and the most that processes had beside it on such cards, as others published."""

    @property
    def usable_bytes(self) -> int:
        """What torch's allocator may have."""
        return self.total_bytes - self.beside_bytes


@dataclass(frozen=True)
class FitsCards(Limit):
    """The peak may be at most what the allocator can have on each of the cards.

    On one of these cards, emulated or not, a region that needs more ends with torch's error, so a
    broken limit is always an estimate from the peak on another device.
    """

    cards: tuple[CardMemory, ...]

    def judge(self, record: RegionRecord) -> Verdict:
        """Return None if the peak, with what was live before the region, fits every card."""
        smallest = min(self.cards, key=lambda card: card.usable_bytes)
        if record.peak_bytes <= smallest.usable_bytes:
            return None
        cards = "; ".join(_words(card, record.peak_bytes) for card in self.cards)
        beside = format_with_unit(smallest.beside_bytes)
        message = (
            f"peak {format_exact(record.peak_bytes)}, with {beside} kept free beside it (CUDA "
            f"context, kernels, libraries): {cards}. This is an estimate from the peak on the "
            "measured device"
        )
        return Breach(self.text, smallest.usable_bytes, record.peak_bytes, message, "peak_bytes")


def _words(card: CardMemory, peak_bytes: int) -> str:
    room = card.usable_bytes - peak_bytes
    size = format_with_unit(abs(room))
    of = f"of {format_with_unit(card.total_bytes)}"
    if room < 0:
        return f"does not fit {card.name} {of}, {size} missing"
    left, (least, most) = card.total_bytes - peak_bytes, card.seen_bytes
    doubt = (
        f", if {format_with_unit(left)} suffice for the CUDA context and loaded kernels: "
        f"{format_with_unit(least)} to {format_with_unit(most)} were seen on such cards"
    )
    return f"fits {card.name} {of}, {size} headroom{doubt if left < most else ''}"
