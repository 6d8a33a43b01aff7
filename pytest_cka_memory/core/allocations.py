"""Where memory was allocated. Keeps no tensor alive; does not import torch."""

import ast
import linecache
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from pytest_cka_memory.core.places import (
    explains_little,
    is_foreign,
    is_foreign_file,
    runner_folders,
    shown,
)

_BYTES_PER_CODE_UNIT = 2
_MAX_LENGTH = 60
_KEPT_END = 20
"""Characters kept at the end of a text that is shortened: often the method that was called."""
_MAX_LINES = 40
_ELLIPSIS = " … "


class _Span(NamedTuple):
    """A part of a file: lines from 1, columns from 0 in bytes of UTF-8, as compilers count."""

    first_line: int
    last_line: int
    start: int
    end: int


def line_at(code: CodeType, last_instruction: int) -> int:
    """Return the line of the instruction at the byte offset `last_instruction`."""
    lines = (
        line for start, end, line in code.co_lines() if line and start <= last_instruction < end
    )
    return next(lines, code.co_firstlineno)


def expression_at(code: CodeType, last_instruction: int) -> str | None:
    """Return the expression that an instruction evaluates, on one line of about 60 characters."""
    whole = _whole_expression_at(code, last_instruction)
    return None if whole is None else _shortened(whole)


def _whole_expression_at(code: CodeType, last_instruction: int) -> str | None:
    """Return the expression that an instruction evaluates, with single spaces.

    Without columns (Python 3.10, ``-X no_debug_ranges``) this is the whole source line. None if the
    source cannot be read, for example because the code was run by ``exec()``.

    Args:
        code: the code that contains the instruction.
        last_instruction: the instruction's byte offset, as in ``frame.f_lasti``.
    """
    # From Python 3.13 on, the source of ``python -c`` is kept under the name of what exec() runs.
    lines = [] if code.co_filename == "<string>" else linecache.getlines(code.co_filename)
    span = _span_at(code, last_instruction)
    if span is None:
        number = line_at(code, last_instruction)
        text = lines[number - 1].strip() if number <= len(lines) else ""
    else:
        text = _text_at(span, lines)
    return " ".join(text.split()) or None


def _span_at(code: CodeType, last_instruction: int) -> _Span | None:
    """Return where the instruction's expression is; None if its columns are not known."""
    positions = getattr(code, "co_positions", None)  # added in Python 3.11
    if positions is None or last_instruction < 0:
        return None
    index = last_instruction // _BYTES_PER_CODE_UNIT
    first_line, last_line, start, end = next(
        islice(positions(), index, None), (None, None, None, None)
    )
    if not first_line or last_line is None or start is None or end is None:
        return None  # a module's first instruction has line 0
    return _Span(first_line, last_line, start, end)


def _text_at(span: _Span, lines: Sequence[str]) -> str:
    """Return the text of `span` on one line; empty if the file has no such lines."""
    if span.last_line > len(lines):
        return ""
    part = [line.encode() for line in lines[span.first_line - 1 : span.last_line]]
    part[-1] = part[-1][: span.end]  # before the first, which may be the same line
    part[0] = part[0][span.start :]
    text = b"".join(part).decode(errors="replace")
    return text if len(part) == 1 else _on_one_line(text)


def _on_one_line(text: str) -> str:
    """Return an expression of several lines on one, if possible without its comments."""
    if text.count("\n") < _MAX_LINES:  # parsing the lines of a large literal takes long
        try:
            return ast.unparse(ast.parse(f"({text})"))
        except (SyntaxError, ValueError, RecursionError):  # not an expression, for example a class
            pass
    return text


def _shortened(line: str) -> str:
    """Return a line without its middle if it is too long."""
    if len(line) <= _MAX_LENGTH:
        return line
    kept_start = _MAX_LENGTH - _KEPT_END - len(_ELLIPSIS)
    return f"{line[:kept_start]}{_ELLIPSIS}{line[-_KEPT_END:]}"


_MAX_FRAMES_SEARCHED = 100
_MAX_FRAMES = 6
Frame = TypeVar("Frame")


class Context(IntEnum):
    """What ran when memory was allocated, as the innermost of torch's functions shows."""

    UNKNOWN = 0
    """None of these, or this was not noted."""
    BACKWARD = 1
    """A backward pass."""
    FORWARD = 2
    """The call of a module."""
    STEP = 3
    """The step of an optimizer."""
    STATE = 4
    """What makes the state of an optimizer in its step."""
    LOADER = 5
    """A data loader."""
    MODULE = 6
    """The constructor of a module, or a method that moves its parameters."""


class Freed(IntEnum):
    """How memory was freed, as far as that shows what held it."""

    NO = 0
    """It is live, or it was freed with the last name or container that held it."""
    IN_OPERATOR = 1
    """While the operator ran that allocated it."""
    WORKSPACE = 2
    """When the workspaces of libraries were dropped."""
    IN_BACKWARD = 3
    """By a backward pass, which had the last reference."""
    WITH_GRAPH = 4
    """With the graph of a tensor, which had the last reference."""


INSIDE = {
    Freed.IN_OPERATOR: "temporary memory of an operator, such as a workspace",
    Freed.WORKSPACE: "workspace of a library",
}
"""What allocated memory that was freed in these ways, and that no tensor of Python's owned."""


class AllocationSite(NamedTuple):
    """The code that allocated memory and, if a tensor was seen to be made there, what it was."""

    frames: tuple[str, ...]
    """Innermost first, ``net.py:11 in Block.forward``; without frames of torch and the plugin."""
    code: str | None = None
    """The expression at the innermost frame, such as ``(weight * batch).sum()``, if known; without
    its middle if it is long."""
    operator: str | None = None
    """The operator that returned the first tensor, such as ``aten.sum``, if known."""
    dtype: str | None = None
    """Of that tensor, if known."""
    shape: tuple[int, ...] | None = None
    """Of that tensor, if known."""
    module: int = 0
    """Identity of the innermost ``torch.nn.Module`` that was running; 0 if none or unknown."""
    expression: str | None = None
    """All of the expression, for what depends on the functions that it calls."""

    @classmethod
    def of_frames(cls, frames: "RawFrames", **known: Any) -> "AllocationSite":
        """Return the site at frames, innermost first; `known` are fields beside code and frames."""
        whole = _innermost_expression(frames)
        code = None if whole is None else _shortened(whole)
        return cls(format_frames(frames), code, expression=whole, **known)


class RecordedSite(Protocol):
    """What a meter records at an allocation, in a form that costs little time."""

    def readable(self) -> AllocationSite:
        """Return the site in a form that people can read."""


class AllocationSource(Protocol):
    """What knows allocations, and keeps no memory alive."""

    def is_live(self, key: int, serial: int) -> bool:
        """Whether the allocation with this key and number has not been freed."""

    def is_shared(self, key: int) -> bool:
        """Whether several storages use it, so that it is not freed with one of them."""


class Allocation(NamedTuple):
    """A storage that was allocated, or grew, in a region.

    A tuple, because a million of them are made to explain a million survivors.
    """

    key: int
    """Address of the storage in C++ or of its data; identifies it while it is live."""
    bytes: int
    """How many of its bytes were allocated in the region."""
    serial: int
    """Its number in the order of all allocations."""
    source: AllocationSource
    """Knows whether it has been freed."""
    recorded: RecordedSite | None = None
    """None if nothing was recorded when it was allocated."""
    is_at_key: bool = False
    """Whether `key` is the address of its data."""
    may_be_unowned: bool = False
    """Whether it is an allocator's block, which may belong to no tensor."""
    pool: str | None = None
    """The pool of a CUDA graph that it was taken from, in words; None if there is none."""

    @property
    def site(self) -> AllocationSite | None:
        """Where it was allocated; None if unknown. To compute it takes time."""
        return None if self.recorded is None else self.recorded.readable()

    def is_live(self) -> bool:
        """Whether it has not been freed."""
        return self.source.is_live(self.key, self.serial)

    def is_shared(self) -> bool:
        """Whether several storages use it, so that it is not freed with one of them."""
        return self.source.is_shared(self.key)


@runtime_checkable
class ManyAllocations(Protocol):
    """Allocations of which some questions are answered without looking at each."""

    def total_bytes(self) -> int:
        """Return the sum of their bytes."""

    def live(self) -> Iterable[Allocation]:
        """Return those that have not been freed."""


def total_bytes(allocations: Sequence[Allocation]) -> int:
    """Return the sum of the bytes of `allocations`."""
    if isinstance(allocations, ManyAllocations):
        return allocations.total_bytes()
    return sum(allocation.bytes for allocation in allocations)


def live_of(allocations: Iterable[Allocation]) -> Iterable[Allocation]:
    """Return those of `allocations` that have not been freed."""
    if isinstance(allocations, ManyAllocations):
        return allocations.live()
    return (allocation for allocation in allocations if allocation.is_live())


@dataclass(frozen=True)
class AllocationGroup:
    """Memory that was live at the peak: one allocation, or several from one place."""

    bytes: int
    """Sum over all of them."""
    count: int
    """Number of allocations."""
    recorded: RecordedSite | None
    """Where they were allocated; None if that was not recorded."""
    before_region: bool = False
    """Whether they were allocated before the region began."""
    inside: str | None = None
    """What allocated them if no tensor owned them, such as ``workspace``."""
    context: Context | None = None
    """What ran when they were allocated; None if this meter does not know it of any memory."""
    freed: Freed = Freed.NO
    """How they were freed."""
    address: int = 0
    """Of its data, for one that was still live when this was read; 0 for others."""
    older: Callable[[], Mapping[int, int]] | None = None
    """Returns address and bytes of what was allocated before the region and is still live; None if
    that is not known, and for other groups."""


RawFrames = tuple[tuple[CodeType, int], ...]
"""Pairs of code and the index of its last instruction: recorded at every allocation in about 1 us.

The line number is computed later. Code objects are kept instead of frames, because a frame keeps
its local variables alive.
"""


def user_frames() -> RawFrames:
    """Return the innermost frames of the user's code, at most two consecutive ones of one file.

    A deep network runs many frames of one file, which would hide the code that called it.
    """
    frames: list[tuple[CodeType, int]] = []
    last = before_last = None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES_SEARCHED):
        if frame is None or len(frames) == _MAX_FRAMES:
            break
        code = frame.f_code
        file = code.co_filename
        if (file != last or last != before_last) and not is_foreign_file[file]:
            frames.append((code, frame.f_lasti))
            before_last, last = last, file
        frame = frame.f_back
    return tuple(frames)


class FramesSite(NamedTuple):
    """The Python frames of an allocation: what a counter in the allocator records."""

    frames: RawFrames
    """Innermost first; all of them, or only those of the user's code."""
    module: int = 0
    """As in :class:`AllocationSite`."""

    def readable(self) -> AllocationSite:
        """Return the frames of the user's code, and the expression at the innermost one."""
        frames = _frames_of_user(self.frames)
        return AllocationSite.of_frames(frames, module=self.module)


class SharedFramesSite(FramesSite):
    """The same for all allocations of one stack, of which there may be 100,000: read once."""

    @cached_property
    def _readable(self) -> AllocationSite:
        return super().readable()

    def readable(self) -> AllocationSite:
        return self._readable


def _frames_of_user(frames: Iterable[tuple[CodeType, int]]) -> RawFrames:
    """Return those of `frames` that :func:`user_frames` would return."""
    frames_of_user: list[tuple[CodeType, int]] = []
    for code, last in frames:
        file = code.co_filename
        is_third_of_one_file = [file, file] == [
            known.co_filename for known, _ in frames_of_user[-2:]
        ]
        if not is_third_of_one_file and not is_foreign(file):
            frames_of_user.append((code, last))
    return tuple(frames_of_user[:_MAX_FRAMES])


def _innermost_expression(frames: RawFrames) -> str | None:
    """Return the expression that the innermost frame evaluates, if its source can be read."""
    return next((_whole_expression_at(code, last) for code, last in _shown(frames)), None)


def users_first(frames: Sequence[Frame], file_of: Callable[[Frame], str]) -> Sequence[Frame]:
    """Return frames without those of Python's library and the like, which explain little; or all.

    It is ``queue.get`` that allocates the batches of worker processes, wherever they are used.
    """
    return [frame for frame in frames if not explains_little(file_of(frame))] or frames


def format_frames(frames: RawFrames) -> tuple[str, ...]:
    """Return frames as text, for example ``torch_cka/cka.py:163 in CKA.compare``."""
    return tuple(
        format_frame(
            code.co_filename, line_at(code, last), getattr(code, "co_qualname", code.co_name)
        )
        for code, last in _shown(frames)
    )


def _shown(frames: RawFrames) -> Sequence[tuple[CodeType, int]]:
    """Return the frames that are shown to users: those of pytest and IPython only clutter."""
    folders = runner_folders()
    called = [frame for frame in frames if not frame[0].co_filename.startswith(folders)]
    return users_first(called, lambda frame: frame[0].co_filename)


def format_frame(filename: str, line: int, name: str) -> str:
    """Return a frame as text; see :func:`.places.shown` for the name of its file."""
    return f"{shown(filename)}:{line} in {name}"
