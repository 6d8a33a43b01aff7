"""The lines of a snapshot as texts, and which of them keep free parts of the reserve.

The texts are without the folders and people that are in paths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_cka_memory.core.reserve import ReserveState, explain_reserve
from pytest_cka_memory.reports import one_line
from pytest_cka_memory.snapshots import unpickling
from pytest_cka_memory.snapshots.analysis import Live, kind_of
from pytest_cka_memory.snapshots.reading import Device, Frame, Snapshot

_LIBRARY = re.compile(r".*(?:/site-packages/|/dist-packages/|/lib/python[\d.]+/)")
_NOTEBOOK = re.compile(r".*ipykernel_\d+/\d+\.py|<ipython-input-.*")
_MOST_CHARACTERS = 120
BEFORE = "before the recording"
_UNKNOWN = {
    unpickling.IN_BACKWARD: "in a backward pass",
    unpickling.IN_OPTIMIZER: "in an optimizer's step",
}
NO_STACK = "no Python line (a backward pass, or no stacks)"


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


class Kept(NamedTuple):
    """What the blocks of one line keep from being released."""

    line: str
    bytes: int
    """Free parts of segments, or pages of expandable ones, that have a block of the line."""
    segments: int
    """How many of these."""


def explained_reserve(snapshot: Snapshot, device: Device) -> ReserveState:
    """Return what the reserve of a device consists of at the end of a recording.

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
