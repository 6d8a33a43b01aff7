"""The limit on growth of the process's memory, with the words that say whose it is."""

from dataclasses import dataclass

from pytest_cka_memory.core.additional_figures import PROCESS
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.processes import MIN_JUDGED_SAMPLES, ProcessUse, steady_growth
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
_NOT_TORCH = (
    "look for memory outside tensors: lists and dicts of Python objects, NumPy arrays, other "
    "libraries, threads"
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
            f"memory of the process grew by {format_exact(growth)} per batch over "
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
    return (
        f"; of {format_with_unit(rise)} growth torch's CPU allocator has "
        f"{format_with_unit(of_torch)}"
    )


def lines_about(record: RegionRecord) -> list[str]:
    """Return a line about each process, the one that grew most first, and what to do."""
    ordered = sorted(record.processes, key=_rise, reverse=True)
    lines = [_line_about(use) for use in ordered]
    workers = sum(_rise(use) for use in ordered if use.name.startswith(WORKER))
    of_torch = record.process_torch_bytes or 0
    if 2 * workers > sum(max(0, _rise(use)) for use in ordered):
        lines.append(f"what to do: {_COPIED}")
    elif 2 * of_torch < (record.process_increase_bytes or 0):
        lines.append(f"what to do: {_NOT_TORCH}")
    return lines


def _rise(use: ProcessUse) -> int:
    return use.peak_bytes - use.start_bytes


def _line_about(use: ProcessUse) -> str:
    growth = use.growth_bytes_per_batch
    grew = f", {format_with_unit(growth)} per batch" if growth else ""
    return (
        f"{use.name} (pid {use.pid}): {format_with_unit(use.start_bytes)} at first, at most "
        f"{format_with_unit(use.peak_bytes)}{grew}"
    )
