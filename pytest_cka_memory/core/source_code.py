"""The source text of the expression that an instruction of a code object evaluates."""

import ast
import linecache
from collections.abc import Sequence
from itertools import islice
from types import CodeType
from typing import NamedTuple

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
    """Return the expression that an instruction evaluates, on one line of about 60 characters.

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
    return _shortened(text) or None


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


def _shortened(text: str) -> str:
    """Return `text` with single spaces, and with its middle left out if it is too long."""
    line = " ".join(text.split())
    if len(line) <= _MAX_LENGTH:
        return line
    kept_start = _MAX_LENGTH - _KEPT_END - len(_ELLIPSIS)
    return f"{line[:kept_start]}{_ELLIPSIS}{line[-_KEPT_END:]}"
