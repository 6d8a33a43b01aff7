"""The birth of a storage: what was born, and the code that bore it. Weak, and without torch."""

import sys
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType

_LONGEST_WALK = 100
_MOST_FRAMES = 6
_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
_FOREIGN = (
    str(Path(__file__).parents[1]),
    *(f"{library / 'torch'}/" for library in _LIBRARIES),
    "<frozen",
    "<string>",
    "<eval_with_key>",
)


class AllocationSite(NamedTuple):
    """The operator that returned a storage's first tensor, and who called it."""

    operator: str
    dtype: str
    shape: tuple[int, ...]
    frames: tuple[str, ...]
    """Innermost first, ``net.py:11 in Block.forward``; without frames of torch and the plugin."""


class Origin(Protocol):
    """What was noted at a birth, in haste."""

    def maker(self) -> AllocationSite:
        """Put it into words."""


@dataclass(frozen=True)
class Allocation:
    """A storage born, or grown, in a region."""

    storage: "ReferenceType[Any]"
    key: int
    """What identifies it while it lives."""
    bytes: int
    """What it holds of the region's own bytes."""
    serial: int
    """Its place among all allocations."""
    origin: Origin | None = None
    """None where no operator was seen making it."""

    @cached_property
    def maker(self) -> AllocationSite | None:
        """Its origin in words, which take longer to find than anything else here."""
        return None if self.origin is None else self.origin.maker()


@dataclass(frozen=True)
class UnownedBlock:
    """A block of the allocator that no tensor owns."""

    bytes: int
    frames: tuple[str, ...]
    """Where it was allocated, innermost first; empty where the allocator kept no history."""


RawFrames = tuple[tuple[CodeType, int], ...]
"""(code, index of the last instruction) pairs: what a microsecond is enough to note, each birth.

Not the line, which is computed when asked for; and code, which holds no tensor as a frame does.
"""


def callers() -> RawFrames:
    """Note the innermost frames of the user's own code, at most two running in any one file.

    Two, because a deep network runs many frames of one file, and would hide who called it.
    """
    found: list[tuple[CodeType, int]] = []
    last = before_last = None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_LONGEST_WALK):
        if frame is None or len(found) == _MOST_FRAMES:
            break
        code = frame.f_code
        file = code.co_filename
        if (file != last or last != before_last) and not _foreign[file]:
            found.append((code, frame.f_lasti))
            before_last, last = last, file
        frame = frame.f_back
    return tuple(found)


def written(frames: RawFrames) -> tuple[str, ...]:
    """Write frames as a reader finds them: ``torch_cka/cka.py:163 in CKA.compare``."""
    return tuple(
        f"{short(code.co_filename)}:{_line(code, last)} in "
        f"{getattr(code, 'co_qualname', code.co_name)}"
        for code, last in frames
        if not short(code.co_filename).startswith(("pluggy/", "_pytest/"))
    )


def _line(code: CodeType, last: int) -> int:
    lines = (line for start, end, line in code.co_lines() if line and start <= last < end)
    return next(lines, code.co_firstlineno)


def short(filename: str) -> str:
    """The last folder and the name of a file."""
    return "/".join(Path(filename).parts[-2:])


def is_foreign(filename: str) -> bool:
    """Whether a file says nothing to a reader: the plugin's, torch's, the interpreter's."""
    return _foreign[filename]


class _Foreign(dict[str, bool]):
    """Whether a file is none of the user's; asked so often that a call would count."""

    def __missing__(self, filename: str) -> bool:
        self[filename] = filename.startswith(_FOREIGN)
        return self[filename]


_foreign = _Foreign()
