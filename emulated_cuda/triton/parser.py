"""Reads TTIR, and which arguments of a kernel point to what it reads and what it writes.

TTIR is the text that ``kernel.asm["ttir"]`` has, one operation a line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

from emulated_cuda.triton.ttir import (
    Block,
    Function,
    Iteration,
    NotComputed,
    Operation,
    Type,
    all_operations,
    type_of,
)

_READING = (
    *("tt.load", "tt.atomic_load", "tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_poll"),
    *("tt.descriptor_load", "tt.descriptor_gather", "tt.descriptor_reduce", "tt.call"),
)
_WRITING = (
    *("tt.store", "tt.atomic_store", "tt.atomic_rmw", "tt.atomic_cas", "tt.call"),
    *("tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce"),
)
_FROM_MEMORY = -1
"""In place of an argument: an address that the kernel has loaded."""


@dataclass(frozen=True)
class Accessed:
    """Positions of a kernel's arguments."""

    read: frozenset[int]
    written: frozenset[int]
    is_complete: bool
    """Whether it reads and writes nothing else; not if it loads addresses from memory."""


def accessed(function: Function) -> Accessed:
    """Return what a kernel may read and write, following its addresses from the arguments."""
    roots: dict[str, set[int]] = defaultdict(set)
    for index, (name, kind) in enumerate(
        zip(function.arguments, function.argument_types, strict=True)
    ):
        if kind.is_pointer or kind.is_descriptor:
            roots[name].add(index)
    size = -1
    while size != (size := sum(map(len, roots.values()))):  # until nothing is added
        for op in all_operations(function.blocks):
            _follow(op, roots)
        _follow_jumps(function.blocks, roots)
    read: set[int] = set()
    written: set[int] = set()
    for op in all_operations(function.blocks):
        # What a called function or assembly does with an address is not followed: it may do all.
        hidden = op.name == "tt.call" or _has_addresses_in_assembly(op)
        targets = op.operands if hidden else op.operands[:1]
        arguments = set(chain.from_iterable(roots[name] for name in targets))
        if hidden or op.name in _READING:
            read |= arguments
        if hidden or op.name in _WRITING:
            written |= arguments
    is_complete = _FROM_MEMORY not in read | written
    return Accessed(
        frozenset(read - {_FROM_MEMORY}), frozenset(written - {_FROM_MEMORY}), is_complete
    )


def _has_addresses_in_assembly(op: Operation) -> bool:
    """Whether an operation is assembly that may read and write memory."""
    return op.name == "tt.elementwise_inline_asm" and "[" in op.quoted()


def _follow(op: Operation, roots: dict[str, set[int]]) -> None:
    """Pass the arguments from which the operands of an operation come on to its results."""
    if op.name in ("tt.load", "tt.atomic_load", "tt.call"):
        # An address that is itself loaded from memory belongs to no argument that is known.
        if op.name == "tt.call" or op.operand_types[0].pointee.is_pointer:
            for name in op.results:
                roots[name].add(_FROM_MEMORY)
    elif not op.regions:
        arguments = set(chain.from_iterable(roots[name] for name in op.operands))
        if arguments and op.name not in _READING:
            for name in op.results:
                roots[name] |= arguments
    else:
        _follow_regions(op, roots)


def _follow_regions(op: Operation, roots: dict[str, set[int]]) -> None:
    ends = [region[-1].operations[-1].operands for region in op.regions]
    names = op.iteration.names if op.iteration is not None else []
    if op.name == "scf.for":  # its first three operands are the start, the end and the step
        _pass_on(op.operands[3:], names, roots)
        _pass_on(ends[0], names, roots)
        _pass_on(names, op.results, roots)
    elif op.name == "scf.while":  # the first value at its first region's end is the condition
        _pass_on(op.operands, names, roots)
        _pass_on(ends[0][1:], op.regions[1][0].arguments, roots)
        _pass_on(ends[0][1:], op.results, roots)
        _pass_on(ends[1], names, roots)
    elif op.name == "scf.if":
        for end in ends:
            _pass_on(end, op.results, roots)


def _follow_jumps(blocks: list[Block], roots: dict[str, set[int]]) -> None:
    for block in blocks:
        end = block.operations[-1]
        if end.name in ("cf.br", "cf.cond_br"):
            arguments = set(chain.from_iterable(roots[name] for name in end.operands))
            for other in blocks:
                for name in other.arguments if f"^{other.label}" in end.text else ():
                    roots[name] |= arguments


def _pass_on(names_given: list[str], names: list[str], roots: dict[str, set[int]]) -> None:
    for source, target in zip(names_given, names, strict=False):
        roots[target] |= roots[source]


_NAME = r"%[\w$.-]+"
_VALUE = re.compile(rf"{_NAME}(?:#\d+)?")
_RESULTS = re.compile(rf"({_NAME}(?::\d+)?(?:,\s*{_NAME}(?::\d+)?)*) = ")
_OPERATION = re.compile(r'"?([a-z_]\w*\.[\w.]+)"?')
_LABEL = re.compile(r"\^(\w+)(?:\((.*)\))?:")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LOCATION = re.compile(r'"(?:[^"\\]|\\.)*"|\s*\bloc\(|[()]')
_FOR = re.compile(rf"(unsigned )?({_NAME}) = (\S+) to (\S+) step (\S+)")
_FUNCTION = re.compile(r'tt\.func (public |private |nested )?@("[^"]*"|[\w$.-]+)\(')


def parse(text: str) -> dict[str, Function]:
    """Return the functions of a kernel by name.

    Raises:
        NotComputed: if the text has another form than that of the versions that are known.
    """
    try:
        return _Parser(text).functions
    except (AssertionError, IndexError, ValueError) as error:
        raise NotComputed(
            f"cannot read the kernel format of this Triton version ({error})"
        ) from None


class _Parser:
    def __init__(self, text: str) -> None:
        lines = (_without_locations(line).strip() for line in text.splitlines())
        self._lines = [line for line in lines if line and not line.startswith(("#", "{-#"))]
        self._at = 0
        self.functions: dict[str, Function] = {}
        while self._at < len(self._lines):
            line = self._next()
            if line.startswith("tt.func"):
                function = self._function(line)
                self.functions[function.name] = function

    def _next(self) -> str:
        self._at += 1
        return self._lines[self._at - 1]

    def _function(self, line: str) -> Function:
        match = _FUNCTION.match(line)
        assert match is not None, line
        end = _closing(line, match.end() - 1)
        arguments, types = [], []
        for part in split(line[match.end() : end]):
            name, _, kind = part.partition(": ")
            arguments.append(name)
            types.append(type_of(kind.partition(" {")[0]))
        blocks = []
        if line.endswith("{"):
            blocks = self._region()
            self._next()  # the closing brace
        is_public = match[1] == "public "
        return Function(match[2].strip('"'), arguments, types, blocks, is_public)

    def _region(self) -> list[Block]:
        """Read blocks up to the line that begins with a brace, which is left."""
        blocks: list[Block] = []
        while not self._lines[self._at].startswith("}"):
            line = self._lines[self._at]
            if line.startswith("^"):
                self._at += 1
                label = _LABEL.match(line)
                assert label is not None, line
                names = [part.partition(":")[0].strip() for part in split(label[2] or "")]
                blocks.append(Block(label[1], names, []))
                continue
            if not blocks:
                blocks.append(Block("", [], []))
            blocks[-1].operations.append(self._operation())
        return blocks or [Block("", [], [])]

    def _operation(self) -> Operation:
        line = self._next()
        results: list[str] = []
        result_names = _RESULTS.match(line)
        if result_names is not None:
            results, line = _expanded(result_names[1]), line[result_names.end() :]
        name = _OPERATION.match(line)
        assert name is not None, line
        operation = Operation(name[1], results, [])
        rest = line[name.end() :].strip()
        if not rest.endswith("{"):
            self._simple(operation, rest)
            return operation
        self._head(operation, rest[:-1].strip())
        operation.regions.append(self._region())
        closing = self._next()
        while closing.endswith("{"):  # } else {, } do {, }, {
            operation.regions.append(self._region())
            closing = self._next()
        if operation.name.startswith("scf."):
            for region in operation.regions:
                _end_with_yield(region[-1])
        if closing.startswith("})"):
            types = closing[closing.index(":") + 1 :]
            _set_types(operation, types)
        return operation

    def _head(self, operation: Operation, rest: str) -> None:
        """Read what stands before the first region."""
        if operation.name == "scf.for":
            bounds = _FOR.match(rest)
            assert bounds is not None, rest
            names, values = _pairs(rest, "iter_args(")
            operation.operands = [bounds[3], bounds[4], bounds[5], *values]
            operation.iteration = Iteration(names, bounds[2], bounds[1] is not None)
        elif operation.name == "scf.while":
            names, operation.operands = _pairs(rest, "(")
            operation.iteration = Iteration(names)
        else:
            operation.attributes = " ".join(re.findall(r"<\{(.*?)\}>", rest))
            operation.operands = _VALUE.findall(_STRING.sub("", rest))
        arrow = _last_outside(rest, "->")
        if arrow >= 0 and not operation.result_types:
            types = rest[arrow + 2 :].strip()
            if types.startswith("("):
                types = types[: _closing(types, 0) + 1]
            operation.result_types = _types(types)

    def _simple(self, operation: Operation, rest: str) -> None:
        colon = _last_outside(rest, ": ")
        body, types = (rest[:colon], rest[colon + 2 :]) if colon >= 0 else (rest, "")
        arrow = _last_outside(rest, "->") if colon < 0 else -1
        if arrow >= 0:  # it has results and no operands
            body, types = rest[:arrow], rest[arrow:]
        brace = _last_outside(body, "{")
        if brace >= 0:
            end = body.rfind("}")
            operation.attributes = body[brace + 1 : end]
            body = body[:brace] + body[end + 1 :]
        operation.text = body.strip()
        operation.operands = _VALUE.findall(_STRING.sub("", operation.text))
        _set_types(operation, types)


def _end_with_yield(block: Block) -> None:
    """Add the end of a block that passes nothing on, which the text leaves out."""
    if not block.operations or block.operations[-1].name not in ("scf.yield", "scf.condition"):
        block.operations.append(Operation("scf.yield", [], []))


def _set_types(operation: Operation, types: str) -> None:
    arrow, to = _last_outside(types, "->"), _last_outside(types, " to ")
    if arrow >= 0:
        operation.operand_types = _types(types[:arrow])
        operation.result_types = _types(types[arrow + 2 :])
    elif to >= 0:
        operation.operand_types = _types(types[:to])
        operation.result_types = _types(types[to + 4 :])
    elif types.strip():
        operation.operand_types = operation.result_types = _types(types)


def _types(text: str) -> list[Type]:
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return [type_of(part) for whole in split(text) for part in whole.split(" * ")]


def _pairs(text: str, opening: str) -> tuple[list[str], list[str]]:
    """Read ``(%a = %b, %c = %d)`` behind `opening`: the names on the left, those on the right."""
    start = text.find(opening)
    if start < 0:
        return [], []
    start += len(opening) - 1
    parts = [part.split(" = ") for part in split(text[start + 1 : _closing(text, start)])]
    return [part[0].strip() for part in parts], [part[1].strip() for part in parts]


def _expanded(names: str) -> list[str]:
    """Return the names of results: ``%0:2`` names ``%0#0`` and ``%0#1``."""
    single = []
    for part in names.split(","):
        name, _, count = part.strip().partition(":")
        single += [f"{name}#{index}" for index in range(int(count))] if count else [name]
    return single


# ---- Brackets and quotes ----


def split(text: str) -> list[str]:
    """Split a text at the commas outside brackets and quotes.

    >>> split('%a, array<i32: 1, 0>, "b, c"')
    ['%a', 'array<i32: 1, 0>', '"b, c"']
    """
    parts, start = [], 0
    for at in _outside(text):
        if text[at] == ",":
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _last_outside(text: str, wanted: str) -> int:
    """Return where `wanted` occurs last outside brackets and quotes; -1 if nowhere."""
    if wanted not in text:
        return -1
    return max((at for at in _outside(text) if text.startswith(wanted, at)), default=-1)


def _outside(text: str) -> list[int]:
    """Return the positions of a text that are outside brackets and quotes."""
    positions, depth, at = [], 0, 0
    while at < len(text):
        character = text[at]
        if character == '"':
            string = _STRING.match(text, at)
            at = string.end() if string else len(text)
            continue
        is_arrow = character == ">" and text[at - 1 : at] == "-"
        if character in ")]}>" and not is_arrow:
            depth -= 1
        if depth == 0:
            positions.append(at)
        if character in "([{<":
            depth += 1
        at += 1
    return positions


def _closing(text: str, opening: int) -> int:
    """Return where the parenthesis at `opening` ends."""
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise ValueError(text)


def _without_locations(line: str) -> str:
    """Return a line without what it says about the source: ``loc("x"("a.py":1:2))``."""
    if "loc(" not in line:
        return line
    kept, depth, start = "", 0, 0
    for location in _LOCATION.finditer(line):
        token = location[0]
        if depth == 0 and token.endswith("loc("):
            kept += line[start : location.start()]
            depth = 1
        elif depth and token in "()":
            depth += 1 if token == "(" else -1
            start = location.end()
    return kept + line[start:]
