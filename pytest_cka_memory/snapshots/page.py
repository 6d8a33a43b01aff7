"""A recording as one HTML page: what was in use when, by which lines, and the reserve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_cka_memory.core.memory_timeline import Place, Recording, moments_of, picture_of
from pytest_cka_memory.core.reserve import reserve_lines
from pytest_cka_memory.reports import html, one_line
from pytest_cka_memory.snapshots.analysis import Analysis, Line, kinds
from pytest_cka_memory.snapshots.beginning import state_after
from pytest_cka_memory.snapshots.reading import INACTIVE, Segment, recorded_settings
from pytest_cka_memory.snapshots.snapshot_text import (
    Read,
    advice_on_reserve,
    explained_reserve,
    kept_by_line,
)
from pytest_cka_memory.units import MB, counted, format_exact

_BEFORE = ("before the region", "before the recording")
"""What the script calls the memory that is older than what it draws, and what it is here."""
_MOST_LINES = 50
_MOST_REFUSALS = 5
_MOST_SEGMENTS = 120
_MOST_PARTS = 12_000
"""Parts of segments that are drawn on a page."""
_MOST_DEVICES = 8
"""Devices whose memory over time is drawn: each may have 200 KB."""


def render(read: Read) -> str:
    """Return the page of a file as HTML. The file's texts are escaped in it."""
    analysis = read.highest
    if analysis is None:
        parts = dict.fromkeys(("NOTICES", "NAVIGATION", "REFUSALS", "KINDS", "ROWS"), "")
        parts |= dict.fromkeys(("TIMELINE", "RESERVE", "SEGMENTS", "FACTS", "STYLE", "SIZES"), "")
        parts |= {"TITLE": html.text(read.name), "VERDICT": "nothing was recorded"}
        return html.fill("snapshot.html", parts)
    timeline = _timeline(read)
    facts = (
        f"<dt>{html.text(name)}</dt><dd>{html.text(fact)}</dd>"
        for name, fact in _facts(read, analysis)
    )
    return html.fill(
        "snapshot.html",
        {
            "TITLE": html.text(f"{read.name}, cuda:{analysis.device.index}"),
            "VERDICT": html.text(_verdict(analysis)),
            "NOTICES": "\n".join(_notices(read, analysis)),
            "NAVIGATION": '<a href="#over-time">Memory over time</a> ' if timeline else "",
            "REFUSALS": "\n".join(_refusals(read, analysis)),
            "KINDS": html.text(_kinds(read, analysis)),
            "ROWS": "\n".join(_rows(read, analysis)),
            "TIMELINE": timeline,
            "RESERVE": "\n".join(_reserve(read, analysis)),
            "SEGMENTS": "\n".join(_segments(analysis.device.segments)),
            "FACTS": "\n".join(facts),
            "STYLE": "".join(map(html.text_of, ("page.css", "timeline.css"))),
            "SIZES": html.text_of("sizes.js"),
        },
    )


def _verdict(analysis: Analysis) -> str:
    used, reserved = analysis.peak.used_bytes / MB, analysis.reserved_peak.reserved_bytes / MB
    text = f"at most {used:,.1f} MB in use, {reserved:,.1f} MB reserved"
    return f"out of memory: {text}" if analysis.refusals else text


def _notices(read: Read, analysis: Analysis) -> Iterator[str]:
    others = [device for device in read.devices if device is not analysis]
    if others:
        names = ", ".join(f"cuda:{device.device.index}" for device in others[:_MOST_DEVICES])
        yield (
            "<p class='notice'>This page shows the device with the most memory in use. Choose "
            f"{html.text(names)} below, in the drawing of memory over time.</p>"
        )
    if analysis.device.is_of_refusal:
        yield (
            "<p class='notice'>The file lists memory that was live when an allocation was "
            "refused; earlier events were not recorded.</p>"
        )
    if not analysis.device.actions:
        yield "<p class='notice'>The file has no events, only the memory at its end.</p>"


def _refusals(read: Read, analysis: Analysis) -> Iterator[str]:
    for refusal in analysis.refusals[-_MOST_REFUSALS:]:
        line = html.text(read.lines.text(refusal.site)[0])
        moment = refusal.moment
        yield (
            f"<p class='notice breach'>Out of memory at event {moment.event:,}: "
            f"<code>{line}</code> asked for {refusal.requested_bytes / MB:,.1f} MB. "
            f"{refusal.free_bytes / MB:,.1f} MB were free on the card, and of "
            f"{moment.reserved_bytes / MB:,.1f} MB reserved, {moment.used_bytes / MB:,.1f} MB "
            "were in use</p>"
        )


def _kinds(read: Read, analysis: Analysis) -> str:
    total = max(1, analysis.peak.used_bytes)
    rows = kinds(read.snapshot, analysis.live(analysis.peak))
    shares = ", ".join(f"{name} {100 * size / total:.0f} %" for name, size in rows)
    return (
        f"{format_exact(analysis.peak.used_bytes)}. By kind, as far as the stacks tell: {shares}."
    )


def _rows(read: Read, analysis: Analysis) -> Iterator[str]:
    rows = read.lines.grouped(analysis.live(analysis.peak))
    end = {row.line: row.bytes for row in read.lines.grouped(analysis.live(analysis.end))}
    for row in rows[:_MOST_LINES]:
        yield _row(row, end.get(row.line, 0))
    rest = rows[_MOST_LINES:]
    if rest:
        size = sum(row.bytes for row in rest)
        text = counted(len(rest), "other line")
        yield _row(Line(text, (), "", size, sum(row.blocks for row in rest)), 0)


def _row(row: Line, at_end: int) -> str:
    callers = "".join(f"<code>{html.text(text)}</code><br>" for text in row.callers)
    more = f"<details><summary>called from</summary>{callers}</details>" if callers else ""
    cells = (
        (f"{row.bytes / MB:,.1f}", "MB"),
        (f"{row.blocks:,}", "Blocks"),
        (f"{at_end / MB:,.1f}" if at_end else "0", "At the end"),
    )
    figures = "".join(f"<td data-label='{label}'>{text}</td>" for text, label in cells)
    return (
        f"<tr>{figures}<td class='word' data-label='Kind'>{html.text(row.kind)}</td>"
        f"<td class='word name'><code>{html.text(row.line)}</code>{more}</td></tr>"
    )


def _timeline(read: Read) -> str:
    drawn = sorted(read.devices, key=lambda each: -each.peak.used_bytes)[:_MOST_DEVICES]
    pictures = [_picture(read, analysis) for analysis in drawn if analysis.steps]
    if not pictures:
        return ""
    parts = {
        "CHOICE": "Device",
        "WHAT": "recording",
        "MORE": "",
        "DATA": html.embedded(pictures),
        "SCRIPT": html.text_of("timeline.js").replace(*_BEFORE),
    }
    return html.fill("timeline.html", parts)


def _picture(read: Read, analysis: Analysis) -> dict[str, Any]:
    """Return a device's memory over time as the script of the page reads it."""

    def places_of(pairs: Sequence[tuple[int, int]]) -> list[Place]:
        texts = (read.lines.text(site) for site, _ in pairs)
        return [Place(line, "", "", "", callers) for line, callers in texts]

    recording = Recording(
        blocks=analysis.recorded_blocks(),
        events=analysis.steps,
        peak_event=analysis.peak.step,
        peak_bytes=analysis.peak.used_bytes,
        start_bytes=analysis.start_bytes,
        host_start_bytes=0,
        site_of=lambda _: None,
        module_path=lambda _: "",
        insides=(None,),
    )
    picture = picture_of(recording, places_of)
    name = f"cuda:{analysis.device.index}"
    picture["name"] = name
    for memory in picture["memories"]:
        memory["name"] = name
        memory["views"] = {"line": memory["views"]["line"]}
        memory["groups"] = [[*group[:-1], group[-1][-1:]] for group in memory["groups"]]
        memory["places"] = [[*texts, []] for texts in memory["places"]]  # nothing holds them now
        memory["reserve"] = _changes(analysis.reserve.highest(moments_of(memory)))
    return picture


def _changes(levels: Sequence[int]) -> list[int]:
    """Return pairs of an index and the level from there on, in one list."""
    runs: list[int] = []
    for index, level in enumerate(levels):
        if not runs or runs[-1] != level:
            runs += [index, level]
    return runs


_NOTHING = "<p>Nothing was reserved.</p>"


def _reserve(read: Read, analysis: Analysis) -> Iterator[str]:
    moment, when = analysis.moment_of_reserve()
    device = state_after(analysis.device, moment.event)
    if device is None or not device.segments:
        yield f"<p>It is not known what was reserved {when}.</p>" if device is None else _NOTHING
        return
    state = explained_reserve(read.snapshot, device)
    yield f"<p>The reserve {when}:</p>"
    for line in reserve_lines(state.parts):
        yield f"<p>{html.text(line)}</p>"
    for row in kept_by_line(device, state, read.lines)[:_MOST_REFUSALS]:
        yield (
            f"<p class='cause'>blocks of <code>{html.text(row.line)}</code> keep the "
            f"allocator from releasing {row.bytes / MB:,.1f} MB in "
            f"{counted(row.segments, 'segment')}</p>"
        )
    if advice := advice_on_reserve(state, moment):
        yield f"<p class='hint'>{html.text(advice[0].upper() + advice[1:])}</p>"


def _segments(segments: Sequence[Segment]) -> Iterator[str]:
    """Yield a bar for each of the largest segments, with what is in use."""
    if not segments:
        return
    largest = sorted(segments, key=lambda each: -each.bytes)
    drawn = sorted(largest[:_MOST_SEGMENTS], key=lambda each: each.address)
    yield "<h3>Segments, in the order of their addresses: what is in use is filled</h3>"
    left = _MOST_PARTS
    for segment in drawn:
        path, parts = _path(segment, left // 10 + 20)
        left = max(0, left - parts)
        used = sum(block.bytes for block in segment.blocks if block.state != INACTIVE)
        label = f"{used / MB:,.1f} of {segment.bytes / MB:,.1f} MB in use"
        yield (
            f"<div class='segment'><span>{segment.bytes / MB:,.0f} MB</span>"
            "<svg viewBox='0 0 1000 1' preserveAspectRatio='none' width='100%' role='img' "
            f"aria-label='{label}'><title>{label}</title><path d='{path}'/></svg></div>"
        )
    if len(segments) > len(drawn):
        left_out = counted(len(segments) - len(drawn), "smaller segment")
        yield f"<p class='legend'>{left_out} not drawn.</p>"


def _path(segment: Segment, most: int) -> tuple[str, int]:
    """Return what is in use as a path, with parts that nearly touch joined if there are many."""
    scale = 1000 / max(1, segment.bytes)
    spans: list[list[float]] = []
    gap = 1000 / most if len(segment.blocks) > most else 0.0
    for block in segment.blocks:
        if block.state == INACTIVE:
            continue
        start = (block.address - segment.address) * scale
        end = start + block.bytes * scale
        if spans and start - spans[-1][1] <= gap:
            spans[-1][1] = end
        else:
            spans.append([start, end])
    parts = "".join(
        f"M{start:.1f},0h{max(0.3, end - start):.1f}v1h-{max(0.3, end - start):.1f}z"
        for start, end in spans
    )
    return parts, len(spans)


def _facts(read: Read, analysis: Analysis) -> Iterator[tuple[str, str]]:
    yield "file", read.name
    yield "events", f"{len(analysis.device):,}, of which {analysis.allocations:,} allocations"
    if analysis.seconds is not None:
        yield "time", f"{analysis.seconds:,.2f} s"
    yield "settings", one_line(recorded_settings(read.snapshot.settings) or "torch's defaults")
    yield "in use when it began", format_exact(analysis.beginning.used_bytes)
    yield "reserved when it began", format_exact(analysis.beginning.reserved_bytes)
    yield "in use at the end", format_exact(analysis.end.used_bytes)
    yield "reserved at the end", format_exact(analysis.end.reserved_bytes)
    yield "out of memory", counted(len(analysis.refusals), "time") if analysis.refusals else "never"
