"""Make dataclasses of plain data that may hold anything: every value has its type, or is named."""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import product
from math import prod
from operator import itemgetter
from reprlib import repr as shortened
from typing import Any, Union, get_args, get_origin, get_type_hints

_MOST_COMBINED = 16
_Build = Callable[[Any], Any]
_ACCEPTED: dict[Any, set[type]] = {
    int: {int},
    float: {float, int},
    str: {str},
    bool: {bool},
    dict: {dict},
}
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
}


MOST = 2**63
"""Numbers are below this: bytes of any machine, and what a float and a table can hold."""


class ShapeError(ValueError):
    """A value that is not what belongs in its place; says where."""

    def __init__(self, wanted: str, given: object) -> None:
        super().__init__(wanted, given)
        self.wanted = wanted
        self.given = given
        self.path = ""

    def within(self, step: str) -> "ShapeError":
        """The same, a step further out."""
        self.path = f"{step}{self.path}"
        return self

    def __str__(self) -> str:
        given = "is missing" if self.given is MISSING else f"is {shortened(self.given)}"
        return f"{self.path.lstrip('.')} {given}; {self.wanted} belongs there"


def shaped(kind: Any, data: Any, where: str, *, flat: tuple[str, ...] = ()) -> Any:
    """Make a `kind` of `data`: a dataclass, ``tuple[X, ...]``, ``X | None`` or a plain type.

    Keys that a dataclass does not know are passed over. `flat` names fields whose own fields lie
    beside them, and that errors leave out.

    Raises:
        ShapeError: where a value is missing or of another type.
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
        return _quick(kind, _dataclass(kind))
    origin, inner = get_origin(kind), get_args(kind)
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
        if type(value) not in accepted or (is_number and not -MOST < value < MOST):
            raise ShapeError(_WORDS[kind], value)
        return value

    return build


def _optional(build_inner: _Build) -> _Build:
    return lambda value: None if value is None else build_inner(value)


def _tuple(build_inner: _Build) -> _Build:
    def build(value: Any) -> Any:
        if type(value) is not list:
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
        given = {}
        for name, inner in value.items():
            try:
                given[name] = build_inner(inner)
            except ShapeError as error:
                error.within(f".{name[:80]}")  # any text, as long as it likes
                raise
        return given

    return build


def _dataclass(kind: Any) -> _Build:
    hints: Mapping[str, Any] = get_type_hints(kind)
    plan = [
        (field.name, _builder(hints[field.name]), _is_required(field)) for field in fields(kind)
    ]

    def build(value: Any) -> Any:
        if type(value) is not dict:
            raise ShapeError("an object", value)
        given = {}
        for name, build_inner, required in plan:
            if name in value:
                try:
                    given[name] = build_inner(value[name])
                except ShapeError as error:
                    error.within(f".{name}")
                    raise
            elif required:
                raise ShapeError("a value", MISSING).within(f".{name}")
        return kind(**given)

    return build


def _quick(kind: Any, build: _Build) -> _Build:
    """As `build`, several times as fast where a dataclass is a few numbers, as samples are."""
    hints = get_type_hints(kind)
    accepted = [_number_types(hints[field.name]) for field in fields(kind)]
    if not all(accepted) or len(accepted) < 2 or prod(map(len, accepted)) > _MOST_COMBINED:
        return build
    good = set(product(*accepted))
    pick = itemgetter(*(field.name for field in fields(kind)))

    def build_quickly(value: Any) -> Any:
        try:
            given = pick(value)
        except (KeyError, TypeError, IndexError):
            return build(value)
        if tuple(map(type, given)) in good:
            numbers = [number for number in given if number]
            if not numbers or (min(numbers) > -MOST and max(numbers) < MOST):
                return kind(*given)
        return build(value)

    return build_quickly


def _number_types(hint: Any) -> set[type]:
    """Every type that a value of this hint has; empty where one is no number."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if not all(part in (int, float, type(None)) for part in parts):
        return set()
    return set().union(*(_ACCEPTED.get(part, {part}) for part in parts))


def _is_required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
