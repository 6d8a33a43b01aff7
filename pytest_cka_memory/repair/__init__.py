"""Try what would lower a peak: run a step under changes, and say what to write.

:mod:`.search` runs a step as it is, then under each change of :mod:`.changes`, alone and in
combinations. :mod:`.observation` says which changes apply, and :mod:`.trials` measures. This module
itself makes the patch, of edits of the user's files: where an expression is, and what to write, as
a diff or a copy. Nothing here asks a device: what runs the step returns its figures.
"""

import ast
import difflib
import dis
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from emulated_cuda.cards import CARDS, CONTEXT_BYTES
from pytest_cka_memory.core.places import is_foreign, is_installed
from pytest_cka_memory.errors import SizeError
from pytest_cka_memory.units import megabytes

_LEAST_SECONDS, _MOST_SECONDS = 20.0, 300.0
_RUNS = 100
"""A search over a GPT of 124 M parameters has up to 57 trials, and counts operations of some."""


def search_seconds(run_s: float) -> float:
    """Return how many seconds a search goes on by default.

    Args:
        run_s: how many the step takes as it is; 0 if it did not run yet.
    """
    return min(max(_LEAST_SECONDS, _RUNS * run_s), _MOST_SECONDS)


def budget_of(to: object, read: Callable[[Any], int] = megabytes) -> int:
    """Return the bytes of a budget: of a card what a program can use of it.

    Args:
        to: the name of a card, or a size.
        read: returns the bytes of a size.

    Raises:
        SizeError: if it is neither.
    """
    if isinstance(to, str) and to in CARDS:
        return CARDS[to].total_bytes - CONTEXT_BYTES
    try:
        return read(to)
    except SizeError as error:
        raise SizeError(f"{error}, or the name of a card: {', '.join(CARDS)}") from None


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


_MOST_LINES = 4


def lines_passed(places: Iterable[tuple[str, int, str]], left_out: Collection[str] = ()) -> str:
    """Return which lines of the user's files an error passed, the innermost first.

    Args:
        places: file, line and function of each frame, the outermost first; an empty name if the
            function is not known.
        left_out: files that are not the user's.
    """
    own = [
        f"{os.path.basename(file)}:{line}{f' in {name}' if name.isidentifier() else ''}"
        for file, line, name in places
        if is_users(file) and file not in left_out
    ]
    more = ["..."] if len(own) > _MOST_LINES else []
    return ", from ".join([*own[: -_MOST_LINES - 1 : -1], *more])


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
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name == code.co_name
        and code.co_firstlineno == min([node.lineno, *(d.lineno for d in node.decorator_list)])
    ]
    return functions[0] if len(functions) == 1 else None


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


_OPENING, _CLOSING = 1, 0
"""What is inserted at one position: texts that close come before texts that open."""


@dataclass(frozen=True)
class Insertion:
    """A text that is inserted, or that replaces an expression."""

    line: int
    column: int
    text: str
    kind: int = _OPENING
    end_line: int = 0
    end_column: int = 0
    """The end of what is replaced; 0 if nothing is."""


@dataclass(frozen=True)
class Edit:
    """One change of one file."""

    file: str
    insertions: tuple[Insertion, ...]
    helpers: tuple[str, ...] = ()
    """Code at the top level that it needs, written once per file before its first use."""


def wrapped(site: Site, before: str, after: str, *helpers: str) -> Edit:
    """Return an edit that writes text around an expression."""
    opening = Insertion(site.line, site.column, before)
    closing = Insertion(site.end_line, site.end_column, after, _CLOSING)
    return Edit(site.file, (opening, closing), helpers)


def with_argument(site: Site, name: str, value: str) -> Edit | None:
    """Return an edit that gives an argument to the call at `site`; None if it is no call."""
    call = _call_at(site)
    if call is None:
        return None
    for keyword in call.keywords:
        if keyword.arg == name:
            node = keyword.value
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            new = Insertion(
                *(node.lineno, node.col_offset, value, _OPENING),
                *(node.end_lineno, node.end_col_offset),
            )
            return Edit(site.file, (new,))
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    comma = ", " if arguments and not _has_trailing_comma(site) else ""
    end = Insertion(site.end_line, site.end_column - 1, f"{comma}{name}={value}", _CLOSING)
    return Edit(site.file, (end,))


def with_callee(site: Site, name: str, *helpers: str) -> Edit | None:
    """Return an edit that calls another function at `site`; None if it is no call."""
    call = _call_at(site)
    if call is None:
        return None
    node = call.func
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    new = Insertion(
        node.lineno, node.col_offset, name, _OPENING, node.end_lineno, node.end_col_offset
    )
    return Edit(site.file, (new,), helpers)


def decorated(code: CodeType, decorator: str, *helpers: str) -> Edit | None:
    """Return an edit that decorates the function of `code`; None if it is not in a user's file."""
    if not is_users(code.co_filename):
        return None
    lines = _lines(code.co_filename)
    first = lines[code.co_firstlineno - 1]
    stripped = first.lstrip()
    if not stripped.startswith((b"def ", b"async def ", b"@")):
        return None
    indent = first[: len(first) - len(stripped)].decode()
    text = f"{indent}{decorator}\n"
    return Edit(code.co_filename, (Insertion(code.co_firstlineno, 0, text),), helpers)


def in_context(site: Site, context: str) -> Edit | None:
    """Return an edit that runs the statement around `site` in ``with context:``.

    None if the statement cannot be indented: it shares its line, or has a string of several lines.
    """
    tree = _tree(site.file)
    statement = next(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return))
            and _contains(node, site)
        ),
        None,
    )
    if statement is None:
        return None
    assert statement.end_lineno is not None
    lines = _lines(site.file)[statement.lineno - 1 : statement.end_lineno]
    indent = lines[0][: statement.col_offset]
    after = lines[-1][statement.end_col_offset :].strip()
    if indent.strip() or (after and not after.startswith(b"#")):
        return None
    if any(
        isinstance(node, (ast.Constant, ast.JoinedStr)) and node.lineno != node.end_lineno
        for node in ast.walk(statement)
    ):
        return None
    start = Insertion(statement.lineno, 0, f"{indent.decode()}with {context}:\n    ")
    rest = (
        Insertion(line, 0, "    ") for line in range(statement.lineno + 1, statement.end_lineno + 1)
    )
    return Edit(site.file, (start, *rest))


def _contains(node: ast.stmt, site: Site) -> bool:
    assert node.end_lineno is not None
    return (node.lineno, node.col_offset) <= (site.line, site.column) and (
        site.end_line,
        site.end_column,
    ) <= (node.end_lineno, node.end_col_offset or 0)


def _call_at(site: Site) -> ast.Call | None:
    where = (site.line, site.column, site.end_line, site.end_column)
    for node in ast.walk(_tree(site.file)):
        if isinstance(node, ast.Call) and where == (
            *(node.lineno, node.col_offset),
            *(node.end_lineno, node.end_col_offset),
        ):
            return node
    return None


def _has_trailing_comma(site: Site) -> bool:
    lines = _lines(site.file)
    before = b"".join([*lines[site.line - 1 : site.end_line - 1]])
    before += lines[site.end_line - 1][: site.end_column - 1]
    return before.rstrip().endswith(b",")


def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_bytes())


def _lines(file: str) -> list[bytes]:
    return Path(file).read_bytes().splitlines(keepends=True)


def patched(edits: Iterable[Edit]) -> Mapping[str, str]:
    """Return the new text of each file that `edits` change.

    Of edits at the same place, the later ones are further out.
    """
    of_file: dict[str, list[Edit]] = defaultdict(list)
    for edit in edits:
        of_file[edit.file].append(edit)
    return {file: _patched(Path(file).read_bytes(), own) for file, own in of_file.items()}


def _patched(source: bytes, edits: list[Edit]) -> str:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    pieces: list[tuple[int, int, int, int, bytes]] = []
    for number, edit in enumerate(edits):
        for each in edit.insertions:
            at = starts[each.line - 1] + each.column
            end = starts[each.end_line - 1] + each.end_column if each.end_line else at
            order = -number if each.kind == _OPENING else number
            pieces.append((at, each.kind, order, end, each.text.encode()))
    helpers = list(dict.fromkeys(helper for edit in edits for helper in edit.helpers))
    if helpers:
        at = starts[_line_for_helpers(source, edits) - 1]
        texts = in_one_text(helpers, set(_imported(source)))
        text = "".join(f"{text}\n\n\n" for text in texts if text).encode()
        pieces.append((at, _OPENING, -len(edits), at, text))
    result, last = b"", 0
    for at, _, _, end, text in sorted(set(pieces), key=lambda piece: piece[:3]):
        result += source[last:at] + text
        last = max(last, end)
    return (result + source[last:]).decode()


def in_one_text(helpers: Iterable[str], known: Collection[str] = ()) -> Iterator[str]:
    """Yield the imports of all helpers that are not `known` as one text, then their functions."""
    helpers = list(helpers)
    lines = [line for helper in helpers for line in helper.splitlines()]
    imports = dict.fromkeys(line for line in lines if line.startswith(("import ", "from ")))
    new = (line for line in imports if not set(_imported(line.encode())) <= set(known))
    yield "\n".join(sorted(new, key=lambda line: (line.startswith("from"), line)))
    for helper in helpers:
        kept = [line for line in helper.splitlines() if line not in imports]
        yield "\n".join(kept).strip()


def _imported(source: bytes) -> Iterator[str]:
    """Yield what a file imports at its top level, with the name that it gets there."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield f"{start}{alias.name} as {alias.asname or alias.name}"


def _line_for_helpers(source: bytes, edits: list[Edit]) -> int:
    """Return the line before which helpers are defined early enough: the first definition."""
    first = min(each.line for edit in edits for each in edit.insertions)
    line = first
    for statement in ast.parse(source).body:
        assert statement.end_lineno is not None
        decorators = getattr(statement, "decorator_list", ())
        start: int = min([statement.lineno, *(node.lineno for node in decorators)])
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            return min(line, start)
        if start <= first <= statement.end_lineno:
            return start
    return line


def without_helpers(edits: Iterable[Edit]) -> list[Edit]:
    """Return the edits without the code at the top level that they need."""
    return [replace(edit, helpers=()) for edit in edits]


def diff(edits: Iterable[Edit]) -> list[str]:
    """Return the lines of a unified diff against the user's files."""
    lines: list[str] = []
    for file, new in patched(edits).items():
        name = os.path.relpath(file)
        name = os.path.basename(file) if name.startswith("..") else name
        old = Path(file).read_text(encoding="utf-8").splitlines()
        lines += difflib.unified_diff(
            *(old, new.splitlines(), f"a/{name}", f"b/{name}"), n=1, lineterm=""
        )
    return lines


def lines_to_change(edits: Iterable[Edit]) -> int:
    """Return how many lines are written, without those of helpers that are only pasted."""
    insertions = (each for edit in edits for each in edit.insertions if each.text.strip())
    return len({(each.line, each.text) for each in insertions})
