"""Where a storage was allocated. Holds weak references only; does not import torch."""

import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType

_MAX_FRAMES_SEARCHED = 100
_MAX_FRAMES = 6
PACKAGE_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"
"""Start of the names of the plugin's own files."""
_SITE_PACKAGES = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
_FOREIGN = (
    PACKAGE_FOLDER,
    *(f"{library / 'torch'}{os.sep}" for library in _SITE_PACKAGES),
    "<frozen",
    "<string>",
    "<eval_with_key>",
)


class AllocationSite(NamedTuple):
    """The operator that returned a storage's first tensor, and the code that called it."""

    operator: str
    dtype: str
    shape: tuple[int, ...]
    frames: tuple[str, ...]
    """Innermost first, ``net.py:11 in Block.forward``; without frames of torch and the plugin."""


class RecordedSite(Protocol):
    """What a meter records at an allocation, in a form that costs little time."""

    def readable(self) -> AllocationSite:
        """Return it in readable form."""


@dataclass(frozen=True)
class Allocation:
    """A storage that was allocated, or grew, in a region."""

    storage: "ReferenceType[Any]"
    key: int
    """Identifies the storage while it is live."""
    bytes: int
    """How many of its bytes were allocated in the region."""
    serial: int
    """Its number in the order of all allocations."""
    recorded: RecordedSite | None = None
    """None if no operator was seen to allocate it."""

    @cached_property
    def site(self) -> AllocationSite | None:
        """Where it was allocated; None if unknown. Computed when first read: this takes time."""
        return None if self.recorded is None else self.recorded.readable()


@dataclass(frozen=True)
class UnownedBlock:
    """A block of the allocator that no tensor owns."""

    bytes: int
    frames: tuple[str, ...]
    """Where it was allocated, innermost first; empty if the allocator kept no history."""


RawFrames = tuple[tuple[CodeType, int], ...]
"""Pairs of code and the index of its last instruction: recorded at every allocation in about 1 us.

The line number is computed later. Code objects are kept instead of frames, because a frame keeps
its local variables alive.
"""


def user_frames() -> RawFrames:
    """Return the innermost frames of the user's code, at most two consecutive ones of one file.

    A deep network runs many frames of one file, which would hide the code that called it.
    """
    found: list[tuple[CodeType, int]] = []
    last = before_last = None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES_SEARCHED):
        if frame is None or len(found) == _MAX_FRAMES:
            break
        code = frame.f_code
        file = code.co_filename
        if (file != last or last != before_last) and not _foreign[file]:
            found.append((code, frame.f_lasti))
            before_last, last = last, file
        frame = frame.f_back
    return tuple(found)


def format_frames(frames: RawFrames) -> tuple[str, ...]:
    """Return frames as text, for example ``torch_cka/cka.py:163 in CKA.compare``."""
    return tuple(
        format_frame(
            code.co_filename, _line(code, last), getattr(code, "co_qualname", code.co_name)
        )
        for code, last in frames
        if not short(code.co_filename).startswith(("pluggy/", "_pytest/"))
    )


def format_frame(filename: str, line: int, name: str) -> str:
    """Return a frame as text, with the last folder and the name of its file."""
    return f"{short(filename)}:{line} in {name}"


def _line(code: CodeType, last: int) -> int:
    lines = (line for start, end, line in code.co_lines() if line and start <= last < end)
    return next(lines, code.co_firstlineno)


def short(filename: str) -> str:
    """Return the last folder and the name of a file."""
    return "/".join(Path(filename).parts[-2:])


def is_foreign(filename: str) -> bool:
    """Whether a file is not the user's: it belongs to the plugin, torch or the interpreter."""
    return _foreign[filename]


class _ForeignFiles(dict[str, bool]):
    """A cache of `is_foreign`: a dict, because a function call per frame would be too slow."""

    def __missing__(self, filename: str) -> bool:
        self[filename] = filename.startswith(_FOREIGN)
        return self[filename]


_foreign = _ForeignFiles()
