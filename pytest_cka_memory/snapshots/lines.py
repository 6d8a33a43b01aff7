"""The lines of a snapshot as texts, without the folders and people that are in its paths."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from pytest_cka_memory.reports.escapes import one_line
from pytest_cka_memory.snapshots import unpickling
from pytest_cka_memory.snapshots.analysis import Live, kind_of
from pytest_cka_memory.snapshots.reading import Frame, Snapshot

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
            found = self._snapshot.sites[site]
            texts = [self._frame(frame) for frame in found.frames]
            words = (text for flag, text in _UNKNOWN.items() if found.flags & flag)
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
        found: dict[str, list[Live]] = {}
        for row in rows:
            found.setdefault(self.text(row.site)[0], []).append(row)
        lines = [
            Line(
                text,
                self.text(parts[0].site)[1],
                kind_of(self._snapshot, parts[0].site),
                sum(part.bytes for part in parts),
                sum(part.blocks for part in parts),
            )
            for text, parts in found.items()
        ]
        return sorted(lines, key=lambda line: (-line.bytes, line.line))


def _root(files: Sequence[str]) -> str:
    """Return the folder that all files share, with a slash; empty if that is hardly a project's."""
    if not files or any(not file.startswith("/") for file in files):
        return ""
    shared = os.path.commonpath([os.path.dirname(file) for file in files])
    return f"{shared}/" if shared.count("/") >= 2 else ""
