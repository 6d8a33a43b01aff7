"""Charts as HTML and SVG: timelines with axes and limits, bytes by owner, and what keeps memory.

Labels of timelines are HTML beside the SVG, so that they keep their size on a narrow page. A
picture of what keeps memory is as wide as a narrow phone and grows downward for the same reason.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.record_parts import OTHER_LEVELS
from pytest_cka_memory.core.retention import Holding, JudgedGrowth, Link, Sample, judged_growth
from pytest_cka_memory.core.verdicts import Breach
from pytest_cka_memory.reports import html, one_line
from pytest_cka_memory.units import MB, counted, format_with_unit

_MOST_POINTS = 200
"""Points of a timeline: more than a line on a screen can show."""
_TICKS = 4
_UNITS = (("GB", 2**30), ("MB", MB), ("KB", 2**10), ("B", 1))
_WIDTH = 336
_LINE = 18
"""Height of a line of text."""
_PADDING = 8
_ARROW = 14
"""Height of the line below the text of a reference, with its head."""
_BOX_CHARACTERS = 38
_REFERENCE_CHARACTERS = 36


class Points(NamedTuple):
    """A timeline with few enough points to draw."""

    levels: list[int]
    """Highest live level after a batch, of every `step` batches."""
    peaks: list[int]
    """Highest peak within a batch, of the same."""
    step: int


class Axis(NamedTuple):
    """The vertical axis of a timeline, in bytes above the level at entry."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    """Position and label."""
    unit: str

    def share(self, value: float) -> float:
        """Return how far up the axis a value is, from 0 to 100."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)


class LimitLine(NamedTuple):
    """A limit as a line over the batches."""

    text: str
    first: float
    """Bytes above the level at entry, at batch `start`."""
    last: float
    """The same at the last batch."""
    start: int = 0
    """Index of a batch, from 0."""


class GrowthLine(NamedTuple):
    """How growth is judged, over the batches: sizes in bytes above the level at entry."""

    first: int
    """Index of the first batch that is judged, from 0; those before it are warm-up."""
    start: int
    """Index of the batch that has the reference level."""
    end: int
    """Index of the last batch that is judged."""
    reference: float
    last: float
    """The level to which the growth per batch leads from the reference level."""
    text: str


def growth_line(record: RegionRecord, breaches: Sequence[Breach]) -> GrowthLine | None:
    """Return how the growth of a region is judged; None if it has too few batches.

    Args:
        record: the region.
        breaches: its broken limits. The first one on growth says how many batches are warm-up; it
            is one batch if there is none.
    """
    warmups = (breach.warmup for breach in breaches if breach.warmup is not None)
    judged = judged_growth(record.timeline, next(warmups, 1))
    if judged is None:
        return None
    # Without the garbage, which is not growth.
    level = judged.reference.allocated_bytes - judged.reference.garbage_bytes
    return _growth_from(judged, level - record.start_bytes)


def _growth_from(judged: JudgedGrowth, reference: float) -> GrowthLine:
    start, end = judged.reference.batch - 1, judged.last.batch - 1
    growth = judged.bytes_per_batch
    sign = "+" if growth > 0 else ""
    text = f"growth: {sign}{format_with_unit(growth)} per batch"
    last = reference + growth * (end - start)
    return GrowthLine(judged.first.batch - 1, start, end, reference, last, text)


def points(samples: Sequence[Sample], level: str = "allocated_bytes") -> Points:
    """Reduce a timeline to the highest level and peak of every few batches.

    Args:
        samples: one for each batch, in their order.
        level: the attribute of a sample that is its level. Others than what is in use have no peak
            within a batch.
    """
    step = -(-len(samples) // _MOST_POINTS) or 1  # rounded up
    groups = [samples[start : start + step] for start in range(0, len(samples), step)]
    return Points(
        [max(getattr(s, level) for s in group) for group in groups],
        [max(s.peak_bytes for s in group) for group in groups]
        if level == "allocated_bytes"
        else [],
        step,
    )


def limit_lines(breaches: Sequence[Breach], record: RegionRecord) -> list[LimitLine]:
    """Return the limits that can be drawn over a timeline: those on levels and on growth.

    Args:
        breaches: the broken limits; those without a measured size are left out.
        record: the region that broke them.
    """
    lines = []
    count = len(record.timeline)
    for breach in breaches:
        allowed = breach.allowed_bytes
        text = f"allowed by {breach.limit}: {format_with_unit(allowed)}"
        if breach.measured_bytes is None:
            continue
        figure = FIGURES.get(breach.figure)
        if figure is None:  # of a limit of another plugin
            continue
        if figure.above_entry:
            lines.append(LimitLine(text, allowed, allowed))
        elif figure.explained_by == "grown" and count:
            # A report of an older version does not have it; the default is one batch.
            start = min(1 if breach.warmup is None else breach.warmup, count - 1)
            base = record.timeline[start].allocated_bytes - record.start_bytes
            rise = allowed * (count - 1 - start)
            lines.append(LimitLine(f"{text} per batch", base, base + rise, start))
    return _merged(lines)


def _merged(lines: Sequence[LimitLine]) -> list[LimitLine]:
    """Return lines of which no two lie on each other; one has the texts of all that do."""
    texts: dict[tuple[object, ...], list[str]] = {}
    for text, *spots in lines:
        texts.setdefault(tuple(spots), []).append(text)
    return [
        line._replace(text="; ".join(texts.pop(tuple(line[1:]))))
        for line in lines
        if tuple(line[1:]) in texts
    ]


def axis(values: Iterable[float]) -> Axis:
    """Return an axis from 0 or the lowest value to the highest, with ticks at round numbers."""
    known = [0.0, *values]
    low, high = min(known), max(known)
    high = high if high > low else low + 1  # an axis needs a length, also for a flat line of 0
    unit, factor = next(row for row in _UNITS if max(abs(low), high) >= row[1] or row[1] == 1)
    step = _round_step((high - low) / factor / _TICKS)
    first, last = math.floor(low / factor / step), math.ceil(high / factor / step)
    digits = max(0, -math.floor(math.log10(step)))
    ticks = [(n * step * factor, f"{n * step:.{digits}f}") for n in range(first, last + 1)]
    return Axis(first * step * factor, last * step * factor, ticks, unit)


def _round_step(step: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50 and so on."""
    power = 10.0 ** math.floor(math.log10(step))
    # Slightly less is enough, because the logarithm and the power are rounded.
    return next(n * power for n in (1, 2, 5, 10) if n * power >= step * 0.999)


class Chart(NamedTuple):
    """What a timeline is drawn from, here and by the page's script."""

    axis: Axis
    points: Points
    limits: list[LimitLine]
    start_bytes: int
    batches: int
    growth: GrowthLine | None = None
    level: str = ""
    """What is drawn, in words; empty for what is in use."""

    def heights(self, sizes: Iterable[float]) -> list[float]:
        """Return how far up the axis these sizes are, which are above the level at entry."""
        return [self.axis.share(size) for size in sizes]

    def spots(self, line: LimitLine) -> tuple[float, float, float]:
        """Return where a limit begins, from 0 to 100, and its heights there and at the end."""
        left = round(100 * line.start / max(1, self.batches - 1), 2)
        return (left, self.axis.share(line.first), self.axis.share(line.last))

    def growth_spots(self) -> list[Any] | None:
        """Return what the page's script needs to draw how growth is judged, from 0 to 100."""
        if self.growth is None:
            return None
        line = self.growth
        across = [round(100 * at / max(1, self.batches - 1), 2) for at in line[:3]]
        style = "growth" if line.last > line.reference else "growth flat"
        return [*across, *self.heights([line.reference, line.last]), style, line.text]

    @property
    def data(self) -> list[Any]:
        """What the page's script needs besides the points."""
        ticks = [[self.axis.share(value), text] for value, text in self.axis.ticks]
        limits = [[*self.spots(line), one_line(line.text)] for line in self.limits]
        return [self.title, self.axis.low, self.axis.high, ticks, limits, self.growth_spots()]

    @property
    def title(self) -> str:
        """What the vertical axis has."""
        if self.level:
            return f"{self.axis.unit}, {self.level}"
        return f"{self.axis.unit} above the level at entry ({format_with_unit(self.start_bytes)})"


def chart_of(record: RegionRecord, breaches: Sequence[Breach]) -> Chart | None:
    """Return the chart of a region's timeline; None for a region without batches."""
    if not record.timeline:
        return None
    drawn = points(record.timeline)
    lines = limit_lines(breaches, record)
    sizes = [size - record.start_bytes for size in (*drawn.levels, *drawn.peaks)]
    ends = (size for line in lines for size in (line.first, line.last))
    growth = growth_line(record, breaches)
    judged = () if growth is None else (growth.reference, growth.last)
    scale = axis([*sizes, *ends, *judged])
    return Chart(scale, drawn, lines, record.start_bytes, len(record.timeline), growth)


_LEVEL_WORDS = {
    "reserved_bytes": "reserved by torch's allocator",
    "outside_bytes": "in use on the card outside torch's allocator",
    "pools_bytes": "reserved by private pools",
}


def charts_of_other_levels(record: RegionRecord, breaches: Sequence[Breach]) -> Iterator[Chart]:
    """Yield a chart of each level other than what is in use whose growth broke a limit."""
    for breach in breaches:
        level = OTHER_LEVELS.get(breach.figure)
        warmup = 1 if breach.warmup is None else breach.warmup
        judged = judged_growth(record.timeline, warmup, level) if level else None
        if level is None or judged is None:
            continue
        growth = _growth_from(judged, getattr(judged.reference, level))
        # The limit starts where growth does, so that the difference between them is the breach.
        rise = breach.allowed_bytes * (growth.end - growth.start)
        allowed = f"allowed by {breach.limit}: {format_with_unit(breach.allowed_bytes)} per batch"
        limit = LimitLine(allowed, growth.reference, growth.reference + rise, growth.start)
        drawn = points(record.timeline, level)
        scale = axis([*drawn.levels, growth.reference, growth.last, limit.last])
        batches = len(record.timeline)
        yield Chart(scale, drawn, [limit], 0, batches, growth, _LEVEL_WORDS[level])


def timeline(chart: Chart) -> Iterator[str]:
    """Yield a figure of levels and peaks per batch, with the limits."""
    levels = [level - chart.start_bytes for level in chart.points.levels]
    peaks = [peak - chart.start_bytes for peak in chart.points.peaks]
    lowest, highest = format_with_unit(min(levels)), format_with_unit(max(levels))
    live = f"live {lowest} to {highest} above the level at entry"
    if chart.level:
        live = f"{lowest} to {highest} {chart.level}"
    growth = chart.growth_spots()
    limits = list(zip(chart.limits, cycle(("limit", "limit second", "limit third")), strict=False))
    below, drawn = [], [_path(chart.heights(peaks), "peak")] if peaks else []
    drawn.append(_path(chart.heights(levels), "level"))
    if growth is not None:
        end, left, right, reference, last, style, _ = growth
        below.append(f"<path class='warmup' d='M0,0H{end}V100H0z'/>")
        drawn += [
            f"<path class='reference' d='M0,{100 - reference:.2f}H100'/>",
            f"<path class='{style}' d='M{left},{100 - reference:.2f}L{right},{100 - last:.2f}'/>",
        ]
    for line, style in limits:
        left, first, last = chart.spots(line)
        drawn.append(f"<path class='{style}' d='M{left},{100 - first:.2f}L100,{100 - last:.2f}'/>")
    yield f"<figure class='chart'><p class='unit'>{chart.title}</p>"
    yield from plot(chart.axis, f"{counted(chart.batches, 'batch')}, {live}", drawn, below)
    yield f"<p class='axis'><span>batch 1</span><span>batch {chart.batches:,}</span></p>"
    step = chart.points.step
    every = f", highest of every {step}" if step > 1 else ""
    live = chart.level or "live"
    yield f"<figcaption><span class='key level'>{live} after each batch{every}</span> "
    if peaks:
        yield "<span class='key peak'>peak within it</span> "
    for line, style in limits:
        yield f"<span class='key {style}'>{html.text(line.text)}</span> "
    if growth is not None:
        yield "<span class='key warmup'>not judged, with the warm-up</span> "
        yield "<span class='key reference'>reference level</span> "
        yield f"<span class='key {growth[-2]}'>{html.text(growth[-1])}</span> "
    yield "</figcaption></figure>"


def plot(scale: Axis, label: str, drawn: Iterable[str], below: Iterable[str] = ()) -> Iterator[str]:
    """Yield a plot with the lines of a grid and the labels of an axis.

    Args:
        scale: the vertical axis.
        label: the picture in words, as HTML.
        drawn: SVG above the grid, from 0 to 100 in both directions.
        below: SVG below it.
    """
    yield "<div class='plot'><svg viewBox='0 0 100 100' preserveAspectRatio='none' role='img' "
    yield f"aria-label='{label}'>"
    yield from below
    for value, _ in scale.ticks:
        yield f"<path class='grid' d='M0,{100 - scale.share(value):.2f}h100'/>"
    yield from drawn
    yield "</svg>"
    for value, text in scale.ticks:
        yield f"<span class='tick' style='bottom:{scale.share(value)}%'>{text}</span>"
    yield "</div>"


def _path(shares: Sequence[float], name: str) -> str:
    across = 100 / max(1, len(shares) - 1)
    spots = "L".join(f"{n * across:.2f},{100 - share:.2f}" for n, share in enumerate(shares))
    return f"<path class='{name}' d='M{spots}{'h100' if len(shares) == 1 else ''}'/>"


def paths_of(holding: Holding, title: str) -> Iterator[str]:
    """Yield the paths to the largest tensor of a group, with what must go to free it."""
    made = f", made at <code>{html.text(holding.made_at)}</code>" if holding.created_at else ""
    yield "<figure class='paths'><figcaption>"
    yield f"<b>{format_with_unit(holding.bytes)}</b> {title}{made}"
    if len(holding.paths) > 1:
        count = "Two" if len(holding.paths) == 2 else f"{len(holding.paths)}"
        every = "both" if len(holding.paths) == 2 else "all"
        yield f"<br>{count} things keep it: {every} references must be removed to free it."
    yield "</figcaption>"
    for path in holding.paths:
        yield f"<div class='path'>{''.join(picture(path))}</div>"
    yield "</figure>"


def picture(path: Sequence[Link]) -> Iterator[str]:
    """Yield the SVG of a path: a box for each object, an arrow for each reference."""
    parts: list[str] = []
    top = 1
    for number, link in enumerate(path):
        if number:
            drawn, top = _arrow(link.reference, top)
            parts += drawn
        style = "root" if number == 0 else "held" if number == len(path) - 1 else "object"
        drawn, top = _box(link.object, top, style)
        parts += drawn
    steps = (f"{link.reference or 'on'} to {link.object}" for link in path[1:])
    words = html.text(", then ".join([f"From {path[0].object}", *steps]))
    yield f"<svg viewBox='0 0 {_WIDTH} {top + 1}' role='img' aria-label='{words}'>"
    yield from parts
    yield "</svg>"


def _box(text: str, top: int, style: str) -> tuple[list[str], int]:
    lines = _lines(text, _BOX_CHARACTERS)
    height = len(lines) * _LINE + 2 * _PADDING
    drawn = [
        f"<g class='{style}'><rect x='1' y='{top}' width='{_WIDTH - 2}' height='{height}' rx='5'/>",
        *_written(lines, 12, top + _PADDING),
        "</g>",
    ]
    return drawn, top + height


def _arrow(text: str, top: int) -> tuple[list[str], int]:
    lines = _lines(text, _REFERENCE_CHARACTERS) if text else []
    bottom = top + max(len(lines), 1) * _LINE + _ARROW
    drawn = [
        f"<path d='M18,{top}V{bottom - 6}'/>",
        f"<path class='head' d='M13,{bottom - 8}L18,{bottom}L23,{bottom - 8}z'/>",
        *_written(lines, 32, top + _ARROW // 2, "link"),
    ]
    return drawn, bottom


def _written(lines: Sequence[str], left: int, top: int, style: str = "") -> Iterator[str]:
    named = f" class='{style}'" if style else ""
    for number, line in enumerate(lines):
        baseline = top + number * _LINE + 13
        yield f"<text{named} x='{left}' y='{baseline}'>{html.text(line)}</text>"


def _lines(text: str, width: int) -> list[str]:
    """Return `text` in lines; code has few spaces, so that a line may end after any character."""
    text = one_line(text)
    return [text[start : start + width] for start in range(0, len(text), width)] or [""]
