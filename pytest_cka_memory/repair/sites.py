"""Where the user's files contain the expression that is being evaluated."""

import ast
import dis
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

from pytest_cka_memory.core.libraries import is_foreign, is_installed


@dataclass(frozen=True)
class Site:
    """An expression in a file. Columns are bytes of UTF-8, from 0, as Python counts them."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    function: str
    """The name of the function that contains it."""

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def is_users(file: str) -> bool:
    """Whether a file exists and the user may edit it: it is not part of an installed package."""
    return not is_foreign(file) and not is_installed(file) and os.path.isfile(file)


def calling_site(made: object = None) -> Site | None:
    """Return the innermost expression of the user's files that led here; None if there is none.

    Args:
        made: an object whose ``__init__`` is running: the site is then where it is created.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename) and not _initializes(frame, made):
            return site_of(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None


def calls_directly(depth: int) -> bool:
    """Whether the function `depth` frames further out belongs to a file of the user."""
    return is_users(sys._getframe(depth + 1).f_code.co_filename)


def _initializes(frame: FrameType, made: object) -> bool:
    code = frame.f_code
    if made is None or code.co_name != "__init__" or not code.co_argcount:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is made


def site_of(code: CodeType, last: int) -> Site | None:
    """Return the expression of an instruction; None if it cannot be told from others."""
    positions = getattr(code, "co_positions", None)  # since Python 3.11
    if positions is None:
        return _by_order(code, last)
    line, end_line, column, end_column = next(islice(positions(), last // 2, None))
    if None in (line, end_line, column, end_column):
        return None
    return Site(code.co_filename, line, column, end_line, end_column, code.co_name)


def _by_order(code: CodeType, last: int) -> Site | None:
    """Return the call of an instruction by its place among the calls of its line.

    Python 3.10 knows only lines. Calls are made in the order in which their expressions end, so
    the third call instruction of a line is the third call in its text, if both have as many.
    """
    starts = dict(dis.findlinestarts(code))
    line, at_line = 0, []
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset, line)
        if instruction.opname.startswith("CALL"):
            at_line.append((line, instruction.offset))
    before = [pair for pair in at_line if pair[1] <= last]  # since 3.11 caches follow it
    function = function_of(code)
    if not before or function is None:
        return None
    line = before[-1][0]
    calls = [call for call in _calls(function) if call.lineno == line]
    if len(calls) != sum(each == line for each, _ in at_line):
        return None
    call = calls[sum(each == line for each, _ in before) - 1]
    if not isinstance(call, ast.Call):
        return None
    assert call.end_lineno is not None
    assert call.end_col_offset is not None
    ends = (call.end_lineno, call.end_col_offset)
    return Site(code.co_filename, call.lineno, call.col_offset, *ends, code.co_name)


def function_of(code: CodeType) -> ast.AST | None:
    """Return the tree of a function or of a module; None if there is not exactly one."""
    tree = ast.parse(Path(code.co_filename).read_bytes())
    if code.co_name == "<module>":
        return tree
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name == code.co_name
        and code.co_firstlineno == min([node.lineno, *(d.lineno for d in node.decorator_list)])
    ]
    return found[0] if len(found) == 1 else None


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _calls(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what the code of `node` itself calls, in that order: calls, and comprehensions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _COMPREHENSIONS):
            yield from _calls(ast.Expr(child.generators[0].iter))  # the rest is code of its own
            yield child
        elif not isinstance(child, _SCOPES):
            yield from _calls(child)
            if isinstance(child, ast.Call):
                yield child
