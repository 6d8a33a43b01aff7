"""Analyse a recording: how much was in use and reserved, when, and by which lines of code.

The lines are texts without the folders and people that are in paths.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_cka_memory.core.memory_timeline import RecordedBlock
from pytest_cka_memory.reports import one_line
from pytest_cka_memory.snapshots import unpickling
from pytest_cka_memory.snapshots.beginning import Beginning, beginning_of
from pytest_cka_memory.snapshots.reading import (
    ALLOC,
    INACTIVE,
    OUT_OF_MEMORY,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Device,
    Frame,
    Snapshot,
    rounding,
)

_BEFORE = -1
"""Stands for the site of blocks that are older than the recording and were freed in it."""


class Moment(NamedTuple):
    """The memory after an event."""

    event: int
    """Its number in the recording, from 0; -1 before the first."""
    step: int
    """The number of allocations and releases until then."""
    seconds: float | None
    """Since the first event; None without times."""
    used_bytes: int
    """Blocks in use, as the allocator rounds them."""
    reserved_bytes: int


class Live(NamedTuple):
    """What one place had in use at a moment."""

    site: int
    """Index into the snapshot's sites; -1 for what is older than the recording."""
    bytes: int
    blocks: int


class Refusal(NamedTuple):
    """An allocation for which the card had no memory."""

    moment: Moment
    requested_bytes: int
    free_bytes: int
    """What the card had left then."""
    site: int


@dataclass
class Analysis:
    """What was recorded of one device."""

    device: Device
    beginning: Beginning
    steps: int
    """Number of allocations and releases."""
    allocations: int
    peak: Moment
    reserved_peak: Moment
    end: Moment
    refusals: list[Refusal]
    seconds: float | None
    blocks: _Blocks = field(repr=False)
    reserve: Levels = field(repr=False)

    def live(self, moment: Moment) -> list[Live]:
        """Return what each place had in use at a moment, largest first."""
        by_site: dict[int, list[int]] = {}
        step = moment.step
        for size, begin, end, site in self.blocks.rows():
            if begin <= step and (not end or step < end):
                entry = by_site.setdefault(site, [0, 0])
                entry[0] += size
                entry[1] += 1
        rows = (Live(site, *entry) for site, entry in by_site.items())
        return sorted(rows, key=lambda row: (-row.bytes, row.site))

    def recorded_blocks(self) -> Iterator[RecordedBlock]:
        """Yield the blocks that were allocated in the recording, as pictures take them."""
        for size, begin, end, site in self.blocks.rows():
            if begin:
                yield RecordedBlock(size, begin, end, site, 1, False, 0)
            elif end:
                yield RecordedBlock(size, 0, end, site, 1, False, 0)

    def moment_of_reserve(self) -> tuple[Moment, str]:
        """Return when the reserve mattered, also in words: when memory was refused, or at the end.

        An error has freed some of what filled the card before the recording ends.
        """
        if self.refusals:
            return self.refusals[-1].moment, "when memory was refused"
        return self.end, "at the end"

    @property
    def start_bytes(self) -> int:
        """What was in use when the recording began."""
        return self.beginning.used_bytes


class Levels:
    """The reserve over time.

    Args:
        bytes: when the recording began.
    """

    def __init__(self, bytes: int) -> None:
        self.steps, self.levels = array("I", [0]), array("Q", [bytes])
        """The number of allocations and releases before each change; the reserve after it."""

    def add(self, step: int, level: int) -> None:
        """Note a change."""
        self.steps.append(step)
        self.levels.append(level)

    def highest(self, moments: Sequence[int]) -> list[int]:
        """Return the highest reserve from each moment until the next one.

        Args:
            moments: numbers of allocations and releases, in order, from 0.
        """
        highest_levels, level, at = [], self.levels[0], 0
        for end in [*moments[1:], 2**32]:
            highest = level
            while at < len(self.steps) and self.steps[at] < end:
                level = self.levels[at]
                highest = max(highest, level)
                at += 1
            highest_levels.append(highest)
        return highest_levels


class _Blocks:
    """Blocks in arrays, because there may be millions."""

    def __init__(self) -> None:
        self.sizes, self.begins, self.ends = array("Q"), array("I"), array("I")
        self.sites = array("i")

    def add(self, size: int, begin: int, site: int) -> int:
        """Add a block that is in use from a step on; return its number."""
        self.sizes.append(size)
        self.begins.append(begin)
        self.ends.append(0)
        self.sites.append(site)
        return len(self.sizes) - 1

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield bytes, first step, the step that freed it or 0, and site."""
        return zip(self.sizes, self.begins, self.ends, self.sites, strict=True)


def analysed(snapshot: Snapshot, device: Device) -> Analysis:
    """Return what a recording of a device says.

    Args:
        snapshot: the file.
        device: one of its devices.
    """
    return _Walk(snapshot, device).result()


class _Walk:
    """One pass over the events."""

    def __init__(self, snapshot: Snapshot, device: Device) -> None:
        self._device, self._round = device, rounding(snapshot.settings)
        self._beginning = beginning_of(device)
        self._blocks = _Blocks()
        self._live: dict[int, int] = {}
        """Address -> number of the block there."""
        self._begin()

    def _begin(self) -> None:
        sites = {
            block.address: block.site
            for segment in self._device.segments
            for block in segment.blocks
            if block.state != INACTIVE
        }
        for segment in self._beginning.segments:
            for block in segment.blocks:
                site = sites.get(block.address, _BEFORE) or _BEFORE
                self._live[block.address] = self._blocks.add(block.bytes, 0, site)
        reused = {
            address
            for action, address in zip(self._device.actions, self._device.addresses, strict=True)
            if action == ALLOC
        }
        for address in reused & self._live.keys():
            # What is there at the end is another block than the one of the beginning.
            self._blocks.sites[self._live[address]] = _BEFORE

    def result(self) -> Analysis:
        device, live, blocks, rounded = self._device, self._live, self._blocks, self._round
        freed_by = self._beginning.freed_by
        used, reserved = self._beginning.used_bytes, self._beginning.reserved_bytes
        step = allocations = 0
        peak = (used, -1, 0, reserved)
        reserved_peak = (reserved, -1, 0, used)
        refusals: list[tuple[int, int, int, int]] = []
        reserve = Levels(reserved)
        rows = zip(device.actions, device.addresses, device.sizes, device.places, strict=True)
        for number, (action, address, size, site) in enumerate(rows):
            if action == ALLOC:
                step += 1
                allocations += 1
                size = rounded(size)
                used += size
                live[address] = blocks.add(size, step, site)
                if used > peak[0]:
                    peak = (used, number, step, reserved)
            elif action == freed_by:
                block = live.pop(address, None)
                if block is not None:
                    step += 1
                    used -= blocks.sizes[block]
                    blocks.ends[block] = step
            elif action in (SEGMENT_ALLOC, SEGMENT_MAP):
                reserved += size
                reserve.add(step, reserved)
                if reserved > reserved_peak[0]:
                    reserved_peak = (reserved, number, step, used)
            elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
                reserved -= size
                reserve.add(step, reserved)
            elif action == OUT_OF_MEMORY:
                refusals.append((number, step, used, reserved))
        moment = self._moment
        return Analysis(
            device,
            self._beginning,
            step,
            allocations,
            moment(peak[1], peak[2], peak[0], peak[3]),
            moment(reserved_peak[1], reserved_peak[2], reserved_peak[3], reserved_peak[0]),
            moment(len(device) - 1, step, used, reserved),
            [
                Refusal(
                    moment(*refusal),
                    device.sizes[refusal[0]],
                    device.addresses[refusal[0]],
                    device.places[refusal[0]],
                )
                for refusal in refusals
            ],
            self._seconds(len(device) - 1),
            blocks,
            reserve,
        )

    def _moment(self, event: int, step: int, used: int, reserved: int) -> Moment:
        return Moment(event, step, self._seconds(event), used, reserved)

    def _seconds(self, event: int) -> float | None:
        times = self._device.times
        if not times or not times[0] or event < 0:
            return None
        return max(0, times[event] - times[0]) / 1e6


_KINDS = (
    (unpickling.IN_OPTIMIZER, "optimiser"),
    (unpickling.IN_BACKWARD, "backward pass"),
    (unpickling.IN_MODULE, "activations"),
    (unpickling.IN_CONVERSION, "parameters"),
)


def kind_of(snapshot: Snapshot, site: int) -> str:
    """Return what memory of a site probably is: as far as its stack tells.

    Args:
        snapshot: the file.
        site: a number of :class:`Live`.
    """
    if site == _BEFORE:
        return "before the recording"
    recorded = snapshot.sites[site]
    if not recorded.frames and not recorded.flags:
        return "no stack"
    return next((name for flag, name in _KINDS if recorded.flags & flag), "other")


def kinds(snapshot: Snapshot, rows: Sequence[Live]) -> list[tuple[str, int]]:
    """Return the kinds of what was in use and their bytes, largest first."""
    sizes: dict[str, int] = {}
    for row in rows:
        kind = kind_of(snapshot, row.site)
        sizes[kind] = sizes.get(kind, 0) + row.bytes
    return sorted(sizes.items(), key=lambda item: -item[1])


_LIBRARY = re.compile(r".*(?:/site-packages/|/dist-packages/|/lib/python[\d.]+/)")
_NOTEBOOK = re.compile(r".*ipykernel_\d+/\d+\.py|<ipython-input-.*")
_MOST_CHARACTERS = 120
BEFORE = "before the recording"
_UNKNOWN = {
    unpickling.IN_BACKWARD: "in a backward pass",
    unpickling.IN_OPTIMIZER: "in an optimizer's step",
}
NO_STACK = "no Python line (allocated in a backward pass, or recorded without stacks)"


class Line(NamedTuple):
    """What one line had in use at a moment."""

    line: str
    """``model.py:12 in forward``."""
    callers: tuple[str, ...]
    """The lines that called it, of its largest part."""
    kind: str
    """What it probably is, of its largest part."""
    bytes: int
    blocks: int
    other_callers: int = 0
    """From how many other lines it was called."""


class Lines:
    """Writes the sites of a snapshot as lines.

    Args:
        snapshot: the file.
        full_paths: whether to write paths as the file has them. Otherwise they begin at the folder
            that all files of the program share, or at the name of a library.
    """

    def __init__(self, snapshot: Snapshot, *, full_paths: bool = False) -> None:
        self._snapshot, self._full_paths = snapshot, full_paths
        files = {frame.file for site in snapshot.sites for frame in site.frames}
        own = sorted(
            file for file in files if not _LIBRARY.match(file) and not _NOTEBOOK.match(file)
        )
        self._root = _root(own)
        self._texts: dict[int, tuple[str, tuple[str, ...]]] = {}

    def text(self, site: int) -> tuple[str, tuple[str, ...]]:
        """Return a site's line and the lines that called it."""
        if site < 0:
            return BEFORE, ()
        if site not in self._texts:
            recorded_site = self._snapshot.sites[site]
            texts = [self._frame(frame) for frame in recorded_site.frames]
            words = (text for flag, text in _UNKNOWN.items() if recorded_site.flags & flag)
            first = texts[0] if texts else next(words, NO_STACK)
            self._texts[site] = first, tuple(texts[1:])
        return self._texts[site]

    def _frame(self, frame: Frame) -> str:
        file = self.file(frame.file)
        return one_line(f"{file}:{frame.line} in {frame.function}")[-_MOST_CHARACTERS:]

    def file(self, path: str) -> str:
        """Return the path of a file of the snapshot as it is shown."""
        if self._full_paths:
            return path
        if _NOTEBOOK.match(path):
            return "notebook cell"
        library = _LIBRARY.match(path)
        if library:
            return path[library.end() :]
        if self._root and path.startswith(self._root):
            return path[len(self._root) :]
        return re.split(r"[/\\]", path)[-1]

    def grouped(self, rows: Sequence[Live]) -> list[Line]:
        """Return what was in use by line, largest first."""
        parts_of_lines: dict[str, list[Live]] = {}
        for row in rows:
            parts_of_lines.setdefault(self.text(row.site)[0], []).append(row)
        lines = [
            Line(
                text,
                self.text(parts[0].site)[1],
                kind_of(self._snapshot, parts[0].site),
                sum(part.bytes for part in parts),
                sum(part.blocks for part in parts),
                max(0, len({self.text(part.site)[1][:1] for part in parts} - {()}) - 1),
            )
            for text, parts in parts_of_lines.items()
        ]
        return sorted(lines, key=lambda line: (-line.bytes, line.line))


def _root(files: Sequence[str]) -> str:
    """Return the folder that all files share, with a slash; empty if that is hardly a project's."""
    if not files or any(not file.startswith("/") for file in files):
        return ""
    shared = os.path.commonpath([os.path.dirname(file) for file in files])
    return f"{shared}/" if shared.count("/") >= 2 else ""
