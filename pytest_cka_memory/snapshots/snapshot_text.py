"""The analysis of a recording as text and builtin types; which lines keep free memory reserved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_cka_memory.core.reserve import (
    ReserveState,
    explain_reserve,
    reserve_advice,
    reserve_lines,
)
from pytest_cka_memory.reports import one_line
from pytest_cka_memory.snapshots import unpickling
from pytest_cka_memory.snapshots.analysis import (
    BEFORE,
    Analysis,
    Line,
    Lines,
    Moment,
    Refusal,
    analysed,
    kinds,
)
from pytest_cka_memory.snapshots.beginning import state_after
from pytest_cka_memory.snapshots.reading import Device, Snapshot, card_and_script, recorded_settings
from pytest_cka_memory.units import MB, counted

_MOST_LINES = 8
_FEWER_LINES = 3
_MOST_REFUSALS = 3
_MOST_DIFFERENCES = 15
_MOST_ROWS = 64
RECORD = 'torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")'
"""The line that records."""
_OLDER = "memory from before the test, whose lines of code are not known"
_REPAIR = (
    "to see which change of the program lowers the peak: python -m pytest_cka_memory repair --card "
)
_LEAST_UNUSED = 0.05
"""A share of the reserve: advice on less would not be about what fills the card."""
_LEAST_KEPT = 0.02
"""A share of the reserve: what keeps less from being released is not worth a line."""


@dataclass(frozen=True)
class Read:
    """A file with what its devices recorded."""

    snapshot: Snapshot
    lines: Lines
    devices: list[Analysis]

    @property
    def name(self) -> str:
        """The file's name, safe for a terminal."""
        return one_line(self.snapshot.path.name)

    @property
    def highest(self) -> Analysis | None:
        """The device that had most in use."""
        return max(self.devices, key=lambda each: each.peak.used_bytes, default=None)


def read_all(snapshot: Snapshot, *, full_paths: bool = False) -> Read:
    """Return a file with what its devices recorded.

    Args:
        snapshot: the file.
        full_paths: whether lines are written with the paths that the file has.
    """
    lines = Lines(snapshot, full_paths=full_paths)
    return Read(snapshot, lines, [analysed(snapshot, device) for device in snapshot.devices])


def text(files: Sequence[Read]) -> Iterator[str]:
    """Yield the text of one file, the difference of two, or several side by side."""
    rows = [(read, device) for read in files for device in read.devices]
    if len(rows) > 1:
        yield from _side_by_side(rows)
        yield ""
    if len(files) == 2:
        yield from _difference(*files)
        return
    read = max(files, key=lambda each: each.highest.peak.used_bytes if each.highest else -1)
    if read.highest is None:
        yield f"{read.name}: nothing was recorded, and nothing is reserved"
        return
    yield from _device(read, read.highest)


def _device(read: Read, analysis: Analysis) -> Iterator[str]:
    device = analysis.device
    if device.is_of_refusal:
        yield from _at_refusal(read, analysis)
        return
    time = "" if analysis.seconds is None else f" over {analysis.seconds:,.1f} s"
    known = recorded_settings(read.snapshot.settings) or "torch's default settings"
    yield (
        f"{read.name}, cuda:{device.index}: {counted(len(device), 'event')}{time}, "
        f"{counted(analysis.allocations, 'allocation')}, {known}"
    )
    if analysis.beginning.segments and device.actions:
        yield (
            f"the recording begins with {_mb(analysis.beginning.used_bytes)} in use, "
            f"{_mb(analysis.beginning.reserved_bytes)} reserved"
        )
    if device.actions:
        yield f"highest in use    {_moment(analysis.peak, 'reserved')}"
        yield f"highest reserved  {_moment(analysis.reserved_peak, 'in use')}"
    else:
        yield (
            "the file has no events, only the memory at its end; to record events, write at the "
            "program's start"
        )
        yield f"  {RECORD}"
    live = analysis.live(analysis.peak)
    if device.actions:
        yield from _lines("in use at the peak, by line:", read.lines.grouped(live), _MOST_LINES)
        yield _kinds(read.snapshot, live, analysis.peak.used_bytes)
    for refusal in analysis.refusals[-_MOST_REFUSALS:]:
        yield from _refusal(read, analysis, refusal)
    if len(analysis.refusals) > _MOST_REFUSALS:
        yield f"and out of memory at {len(analysis.refusals) - _MOST_REFUSALS:,} earlier events"
    end = read.lines.grouped(analysis.live(analysis.end))
    used, reserved = analysis.end.used_bytes, analysis.end.reserved_bytes
    title = f"in use at the end: {_mb(used)} of {_mb(reserved)} reserved, by line:"
    yield from _lines(title, end, _FEWER_LINES if device.actions else _MOST_LINES)
    yield from _reserve(read, analysis)
    if read.snapshot.host_events:
        yield (
            f"the file also has {counted(read.snapshot.host_events, 'event')} of pinned host "
            "memory, which this text leaves out"
        )
    if device.actions:
        yield f"{_REPAIR}{card_and_script(read.snapshot.origin)}"
        yield (
            "to try other settings of the allocator: python -m pytest_cka_memory replay "
            f"{read.name}"
        )


def _at_refusal(read: Read, analysis: Analysis) -> Iterator[str]:
    """Yield what a file says that was written when memory was refused, without a recording."""
    yield (
        f"{read.name}, cuda:{analysis.device.index}: memory that was live when an allocation was "
        "refused; earlier events were not recorded"
    )
    refusal = analysis.refusals[-1]
    yield _refused(read, refusal, "out of memory:")
    live = analysis.live(refusal.moment)
    rows = [
        row._replace(line=_OLDER, kind="unknown") if row.line == BEFORE else row
        for row in read.lines.grouped(live)
    ]
    yield from _lines("in use then, by line:", rows, _MOST_LINES)
    if live:
        kinds_then = _kinds(read.snapshot, live, refusal.moment.used_bytes)
        yield kinds_then.replace(BEFORE, "older than the test")
    else:
        yield "nothing was in use then"
    yield from _reserve(read, analysis)
    yield "to record earlier events, run pytest with --cka-memory-snapshots=FOLDER, or write at"
    yield f"the program's start {RECORD}"
    yield f"{_REPAIR}{card_and_script(read.snapshot.origin)}"
    yield f"to see whether a setting may be enough: python -m pytest_cka_memory replay {read.name}"


def advice_on_reserve(state: ReserveState, moment: Moment) -> str:
    """Return what to do about a reserve; empty if nearly all of it was in use."""
    unused_bytes = moment.reserved_bytes - moment.used_bytes
    advice = reserve_advice(state.parts, has_limit=False)
    if not advice or unused_bytes < _LEAST_UNUSED * moment.reserved_bytes:
        return ""
    share = 100 * unused_bytes / moment.reserved_bytes
    return f"what to do about the {share:.0f} % that are not in use: {advice}"


def _reserve(read: Read, analysis: Analysis) -> Iterator[str]:
    """Yield what the reserve consists of, and what keeps its free parts."""
    moment, when = analysis.moment_of_reserve()
    device = state_after(analysis.device, moment.event)
    if device is None or not device.segments:
        return
    state = explained_reserve(read.snapshot, device)
    yield f"the reserve {when}:"
    yield from (f"  {line}" for line in reserve_lines(state.parts))
    kept = kept_by_line(device, state, read.lines)
    least = _LEAST_KEPT * moment.reserved_bytes
    for row in [row for row in kept if row.bytes >= least][:_FEWER_LINES]:
        yield (
            f"  blocks of {row.line} keep the allocator from releasing {_mb(row.bytes)} in "
            f"{counted(row.segments, 'segment')}"
        )
    if advice := advice_on_reserve(state, moment):
        yield f"  {advice}"


def _moment(moment: Moment, other: str) -> str:
    first, second = moment.used_bytes, moment.reserved_bytes
    if other == "in use":
        first, second = second, first
    when = "at the beginning" if moment.event < 0 else f"at event {moment.event:,}"
    time = "" if moment.seconds is None else f" ({moment.seconds:,.2f} s)"
    return f"{_mb(first)} {when}{time}, with {_mb(second)} {other}"


def _lines(title: str, rows: Sequence[Line], most: int) -> Iterator[str]:
    if not rows:
        return
    yield title
    shown = rows if len(rows) <= most + 1 else rows[:most]
    for row in shown:
        caller = f", from {row.callers[0]}" if row.callers else ""
        if row.callers and row.other_callers:
            caller += f" and {counted(row.other_callers, 'other line')}"
        yield (
            f"  {row.bytes / MB:>10,.1f} MB in {counted(row.blocks, 'block')}  "
            f"{row.line}{caller}  [{row.kind}]"
        )
    rest = rows[len(shown) :]
    if rest:
        size = sum(row.bytes for row in rest)
        yield f"  {size / MB:>10,.1f} MB in {counted(len(rest), 'other line')}"


def _kinds(snapshot: Snapshot, live: Sequence[Any], total: int) -> str:
    parts = [
        f"{name} {100 * size / max(1, total):.0f} %"
        for name, size in kinds(snapshot, live)
        if size * 200 >= total
    ]
    return f"by kind, as far as the stacks tell: {', '.join(parts)}"


def _refusal(read: Read, analysis: Analysis, refusal: Refusal) -> Iterator[str]:
    moment = refusal.moment
    time = "" if moment.seconds is None else f" ({moment.seconds:,.2f} s)"
    yield _refused(read, refusal, f"out of memory at event {moment.event:,}{time}:")
    rows = read.lines.grouped(analysis.live(moment))
    yield from _lines("  in use then, by line:", rows, _FEWER_LINES)


def _refused(read: Read, refusal: Refusal, start: str) -> str:
    return (
        f"{start} {_mb(refusal.requested_bytes)} were requested by "
        f"{read.lines.text(refusal.site)[0]}; {_mb(refusal.free_bytes)} were free on the card, and "
        f"{_mb(refusal.moment.used_bytes)} of {_mb(refusal.moment.reserved_bytes)} reserved were "
        "in use"
    )


def _side_by_side(rows: Sequence[tuple[Read, Analysis]]) -> Iterator[str]:
    head = [
        "file",
        "device",
        "events",
        "in use MB",
        "at event",
        "reserved MB",
        "end MB",
        "out of memory",
    ]
    table = [head]
    for read, analysis in rows[:_MOST_ROWS]:
        table.append(
            [
                read.name[:40],
                f"cuda:{analysis.device.index}",
                f"{len(analysis.device):,}",
                f"{analysis.peak.used_bytes / MB:,.1f}",
                f"{analysis.peak.event:,}" if analysis.peak.event >= 0 else "begin",
                f"{analysis.reserved_peak.reserved_bytes / MB:,.1f}",
                f"{analysis.end.used_bytes / MB:,.1f}",
                counted(len(analysis.refusals), "time") if analysis.refusals else "-",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        yield "  ".join(cells).rstrip()
    if len(rows) > _MOST_ROWS:
        yield f"and {len(rows) - _MOST_ROWS:,} more"


def _difference(old: Read, new: Read) -> Iterator[str]:
    pairs = zip(old.devices, new.devices, strict=False)
    for before, after in pairs:
        rows = differences(old, before, new, after)
        total = after.peak.used_bytes - before.peak.used_bytes
        reserved = after.reserved_peak.reserved_bytes - before.reserved_peak.reserved_bytes
        yield (
            f"cuda:{after.device.index}: {total / MB:+,.1f} MB at the peak, "
            f"{reserved / MB:+,.1f} MB reserved, from {old.name} to {new.name}"
        )
        if not rows:
            yield "  each line has the same memory at the peak as before"
        for line, change, now in rows[:_MOST_DIFFERENCES]:
            yield f"  {change / MB:>+12,.1f} MB, now {now / MB:,.1f} MB  {line}"
        rest = rows[_MOST_DIFFERENCES:]
        if rest:
            size = sum(change for _, change, _ in rest)
            yield f"  {size / MB:>+12,.1f} MB in {counted(len(rest), 'other line')}"


def differences(
    old: Read, before: Analysis, new: Read, after: Analysis
) -> list[tuple[str, int, int]]:
    """Return line, change and new bytes of each line whose bytes at the peak differ.

    Args:
        old: a file.
        before: one of its devices.
        new: another file.
        after: the device of it to compare with.
    """
    were = {row.line: row.bytes for row in old.lines.grouped(before.live(before.peak))}
    are = {row.line: row.bytes for row in new.lines.grouped(after.live(after.peak))}
    rows = [
        (line, are.get(line, 0) - were.get(line, 0), are.get(line, 0))
        for line in {**were, **are}
        if are.get(line, 0) != were.get(line, 0)
    ]
    return sorted(rows, key=lambda row: (-abs(row[1]), row[0]))


def as_data(read: Read) -> dict[str, Any]:
    """Return what a file says as builtin types, sizes in bytes."""
    return {
        "file": read.snapshot.path.name,
        "settings": dict(read.snapshot.settings),
        "devices": [_data(read, analysis) for analysis in read.devices],
    }


def _data(read: Read, analysis: Analysis) -> dict[str, Any]:
    return {
        "device": analysis.device.index,
        "events": len(analysis.device),
        "allocations": analysis.allocations,
        "seconds": analysis.seconds,
        "start_used_bytes": analysis.beginning.used_bytes,
        "start_reserved_bytes": analysis.beginning.reserved_bytes,
        "peak": _moment_data(read, analysis, analysis.peak),
        "reserved_peak": analysis.reserved_peak._asdict(),
        "end": _moment_data(read, analysis, analysis.end),
        "kinds": dict(kinds(read.snapshot, analysis.live(analysis.peak))),
        "out_of_memory": [
            {
                **_moment_data(read, analysis, refusal.moment),
                "requested_bytes": refusal.requested_bytes,
                "free_bytes": refusal.free_bytes,
                "line": read.lines.text(refusal.site)[0],
            }
            for refusal in analysis.refusals
        ],
    }


def _moment_data(read: Read, analysis: Analysis, moment: Moment) -> dict[str, Any]:
    rows = read.lines.grouped(analysis.live(moment))
    return {**moment._asdict(), "lines": [row._asdict() for row in rows[:100]]}


def _mb(size: int) -> str:
    return f"{size / MB:,.1f} MB"


class Kept(NamedTuple):
    """What the blocks of one line keep from being released."""

    line: str
    bytes: int
    """Free parts of segments, or pages of expandable ones, that have a block of the line."""
    segments: int
    """How many of these."""


def explained_reserve(snapshot: Snapshot, device: Device) -> ReserveState:
    """Return what the reserve of a device consists of, at the end of a recording.

    Args:
        snapshot: the file.
        device: one of its devices.
    """
    names = {name: number for number, name in enumerate(device.pool_names)}
    return explain_reserve(
        _segments(device),
        snapshot.settings,
        pool_name=lambda pool: f"private pool {names[pool[0], pool[1]]}",
    )


def _segments(device: Device) -> Iterator[Mapping[str, Any]]:
    """Yield the segments with the names that torch gives their parts."""
    for segment in device.segments:
        yield {
            "address": segment.address,
            "total_size": segment.bytes,
            "stream": device.stream_names[segment.stream],
            "segment_pool_id": device.pool_names[segment.pool],
            "segment_type": "small" if segment.is_small else "large",
            "is_expandable": segment.is_expandable,
            "blocks": [
                {
                    "address": block.address,
                    "size": block.bytes,
                    "requested_size": block.requested_bytes,
                    "state": unpickling.STATES[block.state],
                }
                for block in segment.blocks
            ],
        }


def kept_by_line(device: Device, state: ReserveState, lines: Lines) -> list[Kept]:
    """Return which lines' blocks keep free memory from being released, the most first.

    A free part beside blocks of several lines counts for each of them.

    Args:
        device: the recording.
        state: its reserve.
        lines: writes the sites of the file.
    """
    sites = {block.address: block.site for segment in device.segments for block in segment.blocks}
    kept: dict[str, list[int]] = {}
    for part in state.partly_used:
        for line in {lines.text(sites.get(address, 0))[0] for address in part.blocks}:
            entry = kept.setdefault(line, [0, 0])
            entry[0] += part.free_bytes
            entry[1] += 1
    rows = (Kept(line, *entry) for line, entry in kept.items())
    return sorted(rows, key=lambda row: (-row.bytes, row.line))
