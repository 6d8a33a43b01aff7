"""Memory over time: what a meter has recorded of a region, reduced to what a picture needs.

A moment is an event at which the picture knows every level exactly. If there are too many events,
the highest of every few is kept, and all of those around the peak. The places of a timeline are
divided into bands: few enough to tell apart in a picture.

The samples at batch boundaries, ``timeline`` of a record, are in :mod:`.retention`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from pytest_cka_memory.core.allocations import RecordedSite
from pytest_cka_memory.units import counted

_MOST_BANDS = 12
_MOST_MODULES = 10
_UNKNOWN = "outside Python code, such as in a backward pass"


class Place(NamedTuple):
    """Where blocks were allocated, in words; what is unknown is empty."""

    line: str
    """``net.py:11 in Block.forward``."""
    code: str
    """The expression there."""
    module: str
    """The path of the module that was running."""
    inside: str
    """What allocated them if no tensor owned them."""
    callers: tuple[str, ...]
    """The lines that called `line`."""


Weight = tuple[int, int]
"""Of a place: bytes at the peak, and the most at any moment."""


@dataclass(frozen=True)
class Bands:
    """The bands of one view, from the bottom of the picture to its top."""

    labels: Sequence[str]
    of_place: Mapping[int, int]
    """Number of a place -> number of its band."""


def bands_by_line(places: Sequence[Place], weights: Mapping[int, Weight]) -> Bands:
    """Return one band for each of the lines that allocated most, and one for all others."""
    return _largest({place: _line(places[place]) for place in weights}, weights, "line")


def bands_by_module(places: Sequence[Place], weights: Mapping[int, Weight]) -> Bands:
    """Return bands of modules, where large ones are divided; what no module has is in lines."""
    sizes: dict[str, Weight] = {}
    for place, weight in weights.items():
        path = places[place].module
        if path:
            sizes[path] = _added(sizes.get(path, (0, 0)), weight)
    names = _modules(sizes)
    labels = {
        place: names.get(places[place].module) or f"no module: {_line(places[place])}"
        for place in weights
    }
    return _largest(labels, weights, "place")


def _line(place: Place) -> str:
    line = place.line or (place.inside or _UNKNOWN)
    code = f": {place.code}" if place.code else ""
    inside = f" ({place.inside})" if place.inside and place.line else ""
    return f"{line}{code}{inside}"


def _added(weight: Weight, other: Weight) -> Weight:
    return weight[0] + other[0], weight[1] + other[1]


def _largest(labels: Mapping[int, str], weights: Mapping[int, Weight], noun: str) -> Bands:
    sizes: dict[str, Weight] = {}
    for place, label in labels.items():
        sizes[label] = _added(sizes.get(label, (0, 0)), weights[place])
    by_need = sorted(sizes, key=lambda label: (-2 * sizes[label][0] - sizes[label][1], label))
    chosen = by_need if len(by_need) <= _MOST_BANDS else by_need[: _MOST_BANDS - 1]
    shown = sorted(chosen, key=lambda label: (-sizes[label][0], -sizes[label][1], label))
    numbers = {label: number for number, label in enumerate(shown)}
    rest = len(sizes) - len(shown)
    other = [f"{counted(rest, f'other {noun}')}"] if rest else []
    of_place = {place: numbers.get(label, len(shown)) for place, label in labels.items()}
    return Bands([*shown, *other], of_place)


def _modules(sizes: Mapping[str, Weight]) -> dict[str, str]:
    """Return path -> the module whose band it is in.

    It begins with the outermost modules and divides the largest into its children, again and
    again, as long as the bands are few enough.
    """
    bands = _children("", sizes)
    whole: set[str] = set()
    while True:
        open_bands = [name for name in bands if name not in whole and set(bands[name]) != {name}]
        if not open_bands:
            break
        largest = max(open_bands, key=lambda name: _weight(bands[name], sizes))
        parts = _children(largest, bands[largest])
        if len(bands) - 1 + len(parts) > _MOST_MODULES:
            whole.add(largest)
        else:
            del bands[largest]
            bands.update(parts)
            whole.update({largest} & set(parts))
    return {path: name for name, paths in bands.items() for path in paths}


def _weight(paths: Iterable[str], sizes: Mapping[str, Weight]) -> Weight:
    total = (0, 0)
    for path in paths:
        total = _added(total, sizes[path])
    return total


def _children(name: str, paths: Iterable[str]) -> dict[str, list[str]]:
    """Return child of a module -> the paths in it; a path that is the module's own stays one."""
    start = f"{name}." if name else ""
    children: dict[str, list[str]] = {}
    for path in paths:
        part = path.removeprefix(start).partition(".")[0] if path != name else ""
        children.setdefault(f"{start}{part}" if part else name, []).append(path)
    return children


class RecordedBlock(NamedTuple):
    """A block, or several that were merged. Events are numbered from 1, in their order."""

    bytes: int
    """Of merged blocks: what they had on average between their first and last event."""
    begin: int
    """The event of its allocation; 0 if it is older than the region."""
    end: int
    """The event of its release; 0 if it was live at the region's end."""
    stack: int
    """Identifies where it was allocated."""
    allocations: int
    """How many were merged into it, or 1."""
    on_host: bool
    """Whether it is memory of the host beside the measured device."""
    inside: int
    """What allocated it if no tensor owned it: an index into :attr:`Recording.insides`."""


@dataclass(frozen=True)
class Recording:
    """What a region has recorded. The blocks can be read once, while the region is open."""

    blocks: Iterable[RecordedBlock]
    events: int
    """Number of allocations and releases."""
    peak_event: int
    """The event at which the device's level was highest; 0 if that was at the region's start."""
    peak_bytes: int
    """The level then."""
    start_bytes: int
    """The device's level at the start."""
    host_start_bytes: int
    """The same of the host, if another device is measured."""
    site_of: Callable[[int], RecordedSite | None]
    """Returns where the blocks of a stack were allocated."""
    module_path: Callable[[int], str]
    """Returns the path of a module that ran, by its identity; empty if it is unknown."""
    insides: tuple[str | None, ...]
    """What can allocate memory that no tensor owns."""
    merged: int = 0
    """Number of allocations that were merged with others, because there were too many."""
    merged_bytes: int = 0
    """No merged block is larger than this."""
    lost: int = 0
    """Number of allocations that are missing because even merging left too many."""


_MOST_MOMENTS = 1500
_ENVELOPE = 500
"""Moments over a whole region with more events than that."""
_MOST_LEVELS = 2**21
"""Levels that are computed; with more events, the level after every few."""
_NEAR_PEAK = 150
"""Events before and after the peak that are moments too."""
_MOST_SIZES = 2000
"""Sizes of blocks that are told apart at one place."""
_MOST_GROUPS = 400
_MOST_GROUPS_OF_PLACE = 8


class _Blocks:
    """The blocks of one memory, in arrays, because there may be a million of them."""

    def __init__(self) -> None:
        self.sizes, self.begins, self.ends = array("q"), array("I"), array("I")
        self.places, self.counts = array("I"), array("I")

    def add(self, block: RecordedBlock, place: int) -> None:
        self.sizes.append(block.bytes)
        self.begins.append(block.begin)
        self.ends.append(block.end)
        self.places.append(place)
        self.counts.append(block.allocations)

    def __iter__(self) -> Iterator[tuple[int, int, int, int, int]]:
        return zip(self.sizes, self.begins, self.ends, self.places, self.counts, strict=True)


PlacesOf = Callable[[Sequence[tuple[int, int]]], Sequence[Place]]


def picture_of(recording: Recording, places_of: PlacesOf) -> dict[str, Any]:
    """Return the data of a picture as builtin types.

    Args:
        recording: what the region has recorded; its blocks are read.
        places_of: returns the places of pairs of a stack and an index into ``recording.insides``.
    """
    numbers: dict[tuple[int, int], int] = {}
    blocks = {False: _Blocks(), True: _Blocks()}
    for block in recording.blocks:
        inside = block.inside if recording.insides[block.inside] else 0
        place = numbers.setdefault((block.stack, inside), len(numbers))
        blocks[block.on_host].add(block, place)
    places = places_of(list(numbers))
    device, host = blocks[False], blocks[True]
    memories = [_memory(device, places, recording.start_bytes, recording)]
    if host.sizes:
        memories.append(_memory(host, places, recording.host_start_bytes, recording, on_host=True))
    return {
        "events": recording.events,
        "merged": recording.merged,
        "merged_bytes": recording.merged_bytes,
        "lost": recording.lost,
        "memories": memories,
    }


def _memory(
    blocks: _Blocks,
    places: Sequence[Place],
    start_bytes: int,
    recording: Recording,
    *,
    on_host: bool = False,
) -> dict[str, Any]:
    width = recording.events // _MOST_LEVELS + 1
    levels = _levels(blocks, start_bytes, recording.events, width)
    peak_event = recording.peak_event
    if on_host:
        peak_event = min(levels.index(max(levels)) * width, recording.events)
    moments = _moments(levels, peak_event, recording.events, width)
    peak = moments.index(peak_event)
    before, of_places = _series(blocks, moments, start_bytes)
    at_peak = {place: _value_at(steps, peak) for place, steps in of_places.items()}
    known_bytes = _value_at(before, peak) + sum(at_peak.values())
    highest = {place: _highest(steps) for place, steps in of_places.items()}
    weights = {place: (at_peak[place], highest[place]) for place in of_places}
    views = {
        "module": bands_by_module(places, weights),
        "line": bands_by_line(places, weights),
    }
    groups = _groups(blocks, peak_event)
    used = {place: number for number, place in enumerate(dict.fromkeys(g[0] for g in groups))}
    return {
        "host": on_host,
        "start": start_bytes,
        "unknown": 0 if on_host else recording.peak_bytes - known_bytes,
        "moments": _consecutive(moments),
        "peak": peak,
        "before": _runs(before),
        "views": {name: _drawn(bands, of_places) for name, bands in views.items()},
        "places": [[*places[p][:4], list(places[p].callers)] for p in used],
        "groups": [
            [used[place], *group, [bands.of_place.get(place, -1) for bands in views.values()]]
            for place, *group in groups
        ],
    }


def _levels(blocks: _Blocks, start_bytes: int, events: int, width: int) -> array[int]:
    """Return the level at the start and after every `width` events."""
    changes = array("q", bytes(8 * (-(-events // width) + 1)))
    changes[0] = start_bytes
    for size, begin, end in zip(blocks.sizes, blocks.begins, blocks.ends, strict=True):
        if begin:
            changes[-(-begin // width)] += size
        if end:
            changes[-(-end // width)] -= size
    return array("q", accumulate(changes))


def _moments(levels: Sequence[int], peak_event: int, events: int, width: int) -> list[int]:
    if events < _MOST_MOMENTS:
        return list(range(events + 1))
    chosen = {0, events, peak_event}
    step = -(-len(levels) // _ENVELOPE)
    for start in range(0, len(levels), step):
        part = levels[start : start + step]
        chosen.add(min(events, (start + part.index(max(part))) * width))
    chosen.update(range(max(0, peak_event - _NEAR_PEAK), min(events, peak_event + _NEAR_PEAK)))
    return sorted(chosen)


def _consecutive(moments: Sequence[int]) -> list[int]:
    """Run-length encode consecutive moments: [first, length, first, length, ...]."""
    runs: list[int] = []
    for moment in moments:
        if runs and runs[-2] + runs[-1] == moment:
            runs[-1] += 1
        else:
            runs += [moment, 1]
    return runs


_Steps = dict[int, int]
"""Index of a moment -> by how many bytes a level changes there."""


def _series(
    blocks: _Blocks, moments: Sequence[int], start_bytes: int
) -> tuple[_Steps, dict[int, _Steps]]:
    """Return the levels of what is older than the region, and of each place."""
    before: _Steps = defaultdict(int, {0: start_bytes})
    of_places: dict[int, _Steps] = defaultdict(lambda: defaultdict(int))
    never = len(moments)
    for size, begin, end, place, _ in blocks:
        last = bisect_left(moments, end) if end else never
        if not begin:
            before[last] -= size
            continue
        first = bisect_left(moments, begin)
        if first < last:
            steps = of_places[place]
            steps[first] += size
            if end:
                steps[last] -= size
        else:
            of_places.setdefault(place, defaultdict(int))
    return before, of_places


def _value_at(steps: Mapping[int, int], moment: int) -> int:
    return sum(change for when, change in steps.items() if when <= moment)


def _highest(steps: Mapping[int, int]) -> int:
    return max(accumulate(steps[when] for when in sorted(steps)), default=0)


def _runs(steps: Mapping[int, int]) -> list[int]:
    """Return pairs of a moment's index and the level from there on, in one list."""
    level = 0
    runs: list[int] = []
    for when in sorted(steps):
        if steps[when] or not runs:
            level += steps[when]
            runs += [when, level]
    return runs


def _drawn(bands: Bands, of_places: Mapping[int, _Steps]) -> list[list[Any]]:
    """Return the label and the levels of each band."""
    sums: list[_Steps] = [defaultdict(int) for _ in bands.labels]
    for place, steps in of_places.items():
        into = sums[bands.of_place[place]]
        for when, change in steps.items():
            into[when] += change
    return [[label, _runs(steps)] for label, steps in zip(bands.labels, sums, strict=True)]


def _groups(blocks: _Blocks, peak_event: int) -> list[list[int]]:
    """Return groups of blocks of one place and size, those with most bytes at the peak first.

    Each is ``[place, bytes of each, number, number at the peak, bytes at the peak, number live at
    the end, first event, last event]``. The bytes of each are 0 if they differ.
    """
    groups: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for size, begin, end, place, count in blocks:
        if not begin:
            continue
        of_place = groups[place]
        key = size if size in of_place or len(of_place) < _MOST_SIZES else 0
        group = of_place.get(key)
        if group is None:
            group = of_place[key] = [place, key, 0, 0, 0, 0, begin, 0]
        group[2] += count
        if begin <= peak_event and (peak_event < end or not end):
            group[3] += count
            group[4] += size
        if not end:
            group[5] += count
        elif end > group[7]:
            group[7] = end
    largest = [
        group
        for of_place in groups.values()
        for group in sorted(of_place.values(), key=_importance)[:_MOST_GROUPS_OF_PLACE]
    ]
    return sorted(largest, key=_importance)[:_MOST_GROUPS]


def _importance(group: Sequence[int]) -> tuple[int, int]:
    """Return what sorts groups: by bytes at the peak, then by bytes in all, largest first."""
    return -group[4], -group[1] * group[2]


def levels_of(picture: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the level of the measured device at each moment of :func:`picture_of`.

    Returns:
        Pairs of the number of an event and the bytes that are live from there on; empty if the
        picture has none.
    """
    memory = next((each for each in picture["memories"] if not each["host"]), None)
    if memory is None:
        return []
    moments = moments_of(memory)
    changes = [0] * len(moments)
    for steps in (memory["before"], *(band for _, band in memory["views"]["line"])):
        level = 0
        for when, new in zip(steps[::2], steps[1::2], strict=True):
            if when < len(changes):
                changes[when] += new - level
            level = new
    return list(zip(moments, accumulate(changes), strict=True))


def moments_of(memory: Mapping[str, Any]) -> list[int]:
    """Return the events after which a memory of :func:`picture_of` is drawn."""
    runs = memory["moments"]
    starts = zip(runs[::2], runs[1::2], strict=True)
    return [first + number for first, length in starts for number in range(length)]
