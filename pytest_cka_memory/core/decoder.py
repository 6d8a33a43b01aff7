"""Read stored JSON: checks that all files share, and dataclasses built with every value checked.

This is the one decoder of the plugin: reports, baselines and what other processes send all pass
through it. The shared checks are of the bytes, of conflict marks and of the schema.
"""

import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import product
from math import prod
from operator import itemgetter
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pytest_cka_memory.errors import BaselineError, ReportError

_MOST_COMBINATIONS = 16
_LONGEST_VALUE = 40
_Build = Callable[[Any], Any]
_ACCEPTED: dict[Any, set[type]] = {
    int: {int},
    float: {float, int},
    str: {str},
    bool: {bool},
    dict: {dict},
}
_EXPECTED = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
}


MAX_NUMBER = 2**63
"""Numbers must be below this: more bytes than any machine has, and exact enough for a table."""


class ShapeError(ValueError):
    """A value that is missing or has the wrong type; the message says where and what belongs there.

    ``path`` leads to the value: ``regions[0].timeline[2].batch``.
    """

    def __init__(self, expected: str, given: object) -> None:
        super().__init__(expected, given)
        self.expected = expected
        self.given = given
        self.path = ""

    def within(self, step: str) -> "ShapeError":
        """Return the same error with `step` put before its path."""
        self.path = f"{step}{self.path}"
        return self

    def __str__(self) -> str:
        problem = "is missing" if self.given is MISSING else f"is {shown(self.given)}"
        return f"{self.path.lstrip('.')} {problem}; expected {self.expected}"


class RepeatedKeyError(ValueError):
    """A key that an object of a JSON file has twice, so that one of its values would be lost."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict: an ``object_pairs_hook`` for ``json``.

    Raises:
        RepeatedKeyError: if a key is given twice. Its message names the key and, in a region, the
            test.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        test = f" in the region of {shown(values['nodeid'])}" if "nodeid" in values else ""
        raise RepeatedKeyError(f"{shown(twice)} is given twice{test}")
    return values


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened to at most 40 characters."""
    text = shortened(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def decode(kind: Any, data: Any, where: str, *, flat: tuple[str, ...] = ()) -> Any:
    """Build a `kind` from `data`: a dataclass, ``tuple[X, ...]``, ``X | None`` or a plain type.

    A number whose annotation has a note with ``never_negative`` must be 0 or more.

    Args:
        kind: the type to build.
        data: what ``json.loads`` returned; tuples are accepted in place of lists.
        where: start of the path in error messages.
        flat: fields whose own fields lie beside them in `data`; error paths leave these names out.

    Keys that a dataclass does not have are ignored.

    Raises:
        ShapeError: if a value is missing or has the wrong type.
    """
    try:
        return _builder(kind)(data)
    except ShapeError as error:
        inner = error.path
        for name in flat:
            inner = inner.removeprefix(f".{name}")
        error.path = f"{where}{inner}"
        raise


@cache
def _builder(kind: Any) -> _Build:
    if kind is Any:
        return lambda value: value
    if is_dataclass(kind):
        return _numbers_first(kind, _dataclass(kind))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        never_negative = any(getattr(note, "never_negative", False) for note in inner[1:])
        build = _builder(inner[0])
        return _not_negative(build) if never_negative else build
    if origin in (Union, types.UnionType):
        return _optional(_builder(next(part for part in inner if part is not type(None))))
    if origin is tuple:
        return _tuple(_builder(inner[0]))
    if origin is dict:
        return _dict(_builder(inner[1]))
    return _plain(kind)


def _plain(kind: type) -> _Build:
    accepted, is_number = _ACCEPTED[kind], kind in (int, float)

    def build(value: Any) -> Any:
        if type(value) not in accepted or (is_number and not -MAX_NUMBER < value < MAX_NUMBER):
            raise ShapeError(_EXPECTED[kind], value)
        return value

    return build


def _not_negative(build_inner: _Build) -> _Build:
    def build(value: Any) -> Any:
        if type(value) is int and 0 <= value < MAX_NUMBER:  # mostly, so without another call
            return value
        built = build_inner(value)
        if built is not None and built < 0:
            raise ShapeError("a whole number of bytes of at least 0", value)
        return built

    return build


def _optional(build_inner: _Build) -> _Build:
    return lambda value: None if value is None else build_inner(value)


def _tuple(build_inner: _Build) -> _Build:
    def build(value: Any) -> Any:
        if type(value) not in (list, tuple):
            raise ShapeError("a list", value)
        done: list[Any] = []
        try:
            for item in value:
                done.append(build_inner(item))
        except ShapeError as error:
            error.within(f"[{len(done)}]")
            raise
        return tuple(done)

    return build


def _dict(build_inner: _Build) -> _Build:
    def build(value: Any) -> Any:
        if type(value) is not dict:
            raise ShapeError("an object", value)
        built = {}
        for name, inner in value.items():
            try:
                built[name] = build_inner(inner)
            except ShapeError as error:
                error.within(f".{name[:80]}")  # a key can be a text of any length
                raise
        return built

    return build


def _dataclass(kind: Any) -> _Build:
    hints: Mapping[str, Any] = get_type_hints(kind, include_extras=True)
    builders = {field.name: _builder(hints[field.name]) for field in fields(kind)}
    required = [field.name for field in fields(kind) if _is_required(field)]
    # The constructor of a frozen dataclass takes long if it has many fields, of which a record of
    # a region has 60: it has a quicker way. A field may have that name, too.
    quicker = getattr(kind, "of", None)
    make = quicker if isinstance(quicker, types.MethodType) else kind

    def build(value: Any) -> Any:
        if type(value) is not dict:
            raise ShapeError("an object", value)
        built = {}
        # Of most objects it is a few of the fields that are there.
        for name, inner in value.items():
            if name in builders:
                try:
                    built[name] = builders[name](inner)
                except ShapeError as error:
                    error.within(f".{name}")
                    raise
        for name in required:
            if name not in built:
                raise ShapeError("a value", MISSING).within(f".{name}")
        return make(**built)

    return build


def _numbers_first(kind: Any, build: _Build) -> _Build:
    """Return `build` behind a check that is several times as fast for a few plain numbers.

    A long timeline has 100,000 samples, each a handful of numbers.
    """
    hints = get_type_hints(kind)
    accepted = [_number_types(hints[field.name]) for field in fields(kind)]
    if not all(accepted) or len(accepted) < 2 or prod(map(len, accepted)) > _MOST_COMBINATIONS:
        return build
    good = set(product(*accepted))
    pick = itemgetter(*(field.name for field in fields(kind)))

    def build_quickly(value: Any) -> Any:
        try:
            fields = pick(value)
        except (KeyError, TypeError, IndexError):
            return build(value)
        if tuple(map(type, fields)) in good and all(
            number is None or -MAX_NUMBER < number < MAX_NUMBER for number in fields
        ):
            return kind(*fields)
        return build(value)

    return build_quickly


def _number_types(hint: Any) -> set[type]:
    """Return every type that a value of this hint can have; empty if one is not a number."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if not all(part in (int, float, bool, type(None)) for part in parts):
        return set()
    return set().union(*(_ACCEPTED.get(part, {part}) for part in parts))


def _is_required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


# A mark ends its line, or white space follows it: such as the "\r" of a file with "\r\n".
_CONFLICT = re.compile(r"^[ \t]*(?:<{7}|={7}|>{7}|\|{7})(?:[^\S\n].*)?$", re.MULTILINE)


def bytes_of(path: Path, error: type[BaselineError] | type[ReportError]) -> bytes:
    """Return the bytes of a file.

    Args:
        path: of the file; a folder, a pipe and the like are refused, because to read one may block.
        error: what to raise.

    Raises:
        BaselineError, ReportError: whichever `error` is, naming the file.
    """
    try:
        if path.exists() and not path.is_file():
            raise error(f"cannot use {path}: not a regular file")
        return path.read_bytes()
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from None


def line_at(content: bytes | str, position: int) -> int:
    """Return the number, from 1, of the line in which a position of a file is."""
    before = content[:position]
    return 1 + (before.count(b"\n") if isinstance(before, bytes) else before.count("\n"))


def conflict_in(content: str) -> tuple[int, str] | None:
    """Return the line of the first mark of an unresolved merge conflict, and its text."""
    mark = _CONFLICT.search(content)
    return None if mark is None else (line_at(content, mark.start()), mark[0].strip()[:40].strip())


def is_other_version(schema: object, own: str) -> bool:
    """Whether a schema is `own` with another number: another version of the plugin wrote it."""
    name, _, _ = own.rpartition("/")
    numbered = rf"{re.escape(name)}/[1-9][0-9]{{0,8}}"
    return isinstance(schema, str) and bool(re.fullmatch(numbered, schema))
