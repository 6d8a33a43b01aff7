"""What messages say of the memory of processes, and the limit on its growth."""

from dataclasses import dataclass

from pytest_cka_memory.core.figure_rows import PROCESS
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.growth import MIN_JUDGED_SAMPLES, ProcessUse, steady_growth
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.core.verdicts import Breach, Limit, Verdict
from pytest_cka_memory.units import counted, format_exact, format_with_unit

WORKER = "DataLoader worker"
"""The start of the name of a process that loads data."""
_FIGURE = "process_growth_bytes_per_batch"
_COPIED = (
    "the workers grow although they keep nothing: to read a Python object changes its reference "
    "count, which copies the page of memory that it is in. Keep the data set in an array or tensor "
    "instead of a list or dict of Python objects"
)
_KEPT = (
    "the workers keep more and more: look in the data set, its transforms and collate_fn for a "
    "list, dict or cache that grows with each item, and bound its length. With num_workers=0 the "
    "test measures the same code in this process, in which no_cycles finds reference cycles too"
)
_EITHER = (
    "the workers grow, and this system does not count what they copy: with num_workers=0 the test "
    "measures the same code in this process, which grows only if the data set keeps something"
)
_NOT_TORCH = (
    "look for memory outside tensors: lists and dicts of Python objects, NumPy arrays, other "
    "libraries, threads. Python's tracemalloc lists the lines that allocate most of such memory"
)
_TORCH_FREED = (
    "torch's tensors had it, and nothing of them is live now: max_peak_mb has the lines that "
    "allocate most"
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
        seen = record.batches
        needed = self.warmup + MIN_JUDGED_SAMPLES
        return (
            f"cannot be judged because {counted(seen, 'batch')} "
            f"{'was' if seen == 1 else 'were'} seen and {needed} are needed ({self.warmup} to warm "
            f"up, {MIN_JUDGED_SAMPLES} to judge): loop over region.batches(loader), or call "
            "region.batch_done() after each batch"
        )


def whose(record: RegionRecord) -> str:
    """Return how much of a rise torch's CPU allocator has, as the end of a sentence."""
    rise, of_torch = record.process_increase_bytes, record.process_torch_bytes
    if not rise or rise <= 0 or of_torch is None:
        return ""
    has = format_with_unit(of_torch) if of_torch > 0 else "nothing"
    return f"; torch's CPU allocator has {has} of the rise of {format_with_unit(rise)}"


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
        f"{format_with_unit(started)} of the rise came with the start of the children; what else "
        "they have at first, they share with other processes"
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
    grew = f", {format_with_unit(growth)} per batch" if growth else ""
    copied = use.copied_bytes or 0
    is_part = 4 * copied >= max(1, _rise(use))
    copies = f", {format_with_unit(copied)} of it copies of shared pages" if is_part else ""
    return (
        f"{use.name} (pid {use.pid}): {format_with_unit(use.start_bytes)} at first, at most "
        f"{format_with_unit(use.peak_bytes)}{grew}{copies}"
    )
