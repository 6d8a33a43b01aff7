"""Selection of a model's layers, and the features of their outputs during a forward pass.

This module itself selects layers: the modules of a model that are compared, and rows or columns of
a result. Each call of a module is a row or column of the result: the first call of ``relu`` is
labelled ``relu``, its second call ``relu:1``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from cka.errors import InputError, LayerError

Selector: TypeAlias = str | int | type[nn.Module] | Callable[..., bool]
Layers: TypeAlias = Selector | Sequence[Selector] | None

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

# These are never called themselves, so a warning that they did not run would be useless.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Call(NamedTuple):
    """One call of a module within one forward pass."""

    name: str
    """Qualified name of the module; empty for the model itself."""
    number: int
    """0 for the first call of the module in the forward pass."""

    @property
    def label(self) -> str:
        """Name of the row or column."""
        name = self.name or "(model)"
        return f"{name}:{self.number}" if self.number else name


@dataclass(frozen=True)
class Selection:
    """The selected modules and calls of one model."""

    modules: Mapping[str, nn.Module]
    """The modules to record, by qualified name."""
    selector_positions: Mapping[tuple[str, int | None], int]
    """Position of the selector that matched (module name, call number); None means all calls."""

    def order(self, calls: Sequence[Call]) -> list[int]:
        """Return the positions of the selected calls, ordered by selector, then by execution.

        Args:
            calls: the calls of a forward pass, in order of execution.
        """
        selected = [
            (selector, position)
            for position, call in enumerate(calls)
            if (selector := self._selector_of(call)) is not None
        ]
        return [position for _, position in sorted(selected)]

    def _selector_of(self, call: Call) -> int | None:
        of_all_calls = self.selector_positions.get((call.name, None))
        return self.selector_positions.get((call.name, call.number), of_all_calls)

    def never_ran(self, calls: Iterable[Call]) -> list[str]:
        """Return the labels of the selected modules and calls that did not run.

        Args:
            calls: all calls of a forward pass, also those that were left out.
        """
        seen = set(calls)
        names = {call.name for call in seen}
        return [
            Call(name, number or 0).label
            for name, number in self.selector_positions
            if (name not in names if number is None else Call(name, number) not in seen)
        ]


def select(model: nn.Module, layers: Layers) -> Selection:
    """Return the modules of a model that the selectors match.

    Args:
        model: the model whose modules are selected.
        layers: a name (``"layer1.0.relu"``, or ``"layer1.0.relu:1"`` for its second call only),
            an index into the model's layers, a glob, a module type, a predicate of ``(module)``
            or ``(name, module)``, or a sequence of these. None selects every module except the
            model itself. In a glob, ``*`` matches within one level and ``**`` matches any number
            of levels: ``"encoder.layers.*"`` selects the blocks, ``"encoder.layers.**"``
            everything inside them too, ``"**.attn"`` all modules of this name.

    Raises:
        LayerError: if a selector matches nothing; the message suggests close matches.
    """
    if layers is None:
        selectors: Sequence[Any] = [nn.Module]
    elif isinstance(layers, (list, tuple)):
        selectors = layers
    else:
        selectors = [layers]
    if not selectors:
        raise LayerError(
            f"the layer selection is empty, got {layers!r}; write None to compare every layer"
        )
    # A module with two names is selected by either, but by indices, types and globs only once.
    named = dict(model.named_modules(remove_duplicate=False))
    layer_names = _layer_names(model)
    positions: dict[tuple[str, int | None], int] = {}
    for position, selector in enumerate(selectors):
        for match in _matches(selector, named, layer_names):
            positions.setdefault(match, position)  # the first selector decides the order
    return Selection({name: named[name] for name, _ in positions}, positions)


def selects(model: nn.Module, layers: Layers) -> bool:
    """Whether every selector matches a layer of a model.

    Args:
        model: the model.
        layers: the selectors, as for :func:`select`.
    """
    try:
        select(model, layers)
    except LayerError:
        return False
    return True


def _layer_names(model: nn.Module) -> list[str]:
    """Return the names of a model's layers, each module once, or ``[""]`` if it has none."""
    names = [
        name
        for name, module in model.named_modules()
        if name and not isinstance(module, _CONTAINERS)
    ]
    return names or [""]


def _matches(
    selector: Any, named: Mapping[str, nn.Module], layer_names: Sequence[str]
) -> list[tuple[str, int | None]]:
    if isinstance(selector, str):
        return _matching_names(selector, named, layer_names)
    if isinstance(selector, int) and not isinstance(selector, bool):
        count = len(layer_names)
        if not -count <= selector < count:
            raise LayerError(
                f"layer index {selector} is out of range for a model with {count} layers; "
                f"write an index from {-count} to {count - 1}"
            )
        return [(layer_names[selector], None)]
    if isinstance(selector, type):
        names = [name for name in layer_names if isinstance(named[name], selector)]
    elif callable(selector):
        names = [name for name in layer_names if _selects(selector, name, named[name])]
    else:
        raise LayerError(
            f"cannot select layers by {selector!r}; write a name, an index, a glob, a module type "
            "or a predicate"
        )
    if not names:
        described = getattr(selector, "__name__", repr(selector))
        raise LayerError(f"no layer matches {described}; the model has e.g. {_first(layer_names)}")
    return [(name, None) for name in names]


def _matching_names(
    text: str, named: Mapping[str, nn.Module], layer_names: Sequence[str]
) -> list[tuple[str, int | None]]:
    if text in named:  # before globs and calls: names of a ModuleDict may have any characters
        return [(text, None)]
    name, colon, number = text.rpartition(":")
    if colon and name in named and number.isdecimal():
        return [(name, int(number))]
    is_glob = bool(set(text) & set("*?["))
    names = [name for name in layer_names if is_glob and matches_glob(name, text)]
    if not names and is_glob:
        raise LayerError(f"the model has no layer {text!r}; {_glob_hint(text, layer_names)}")
    if not names:
        close = difflib.get_close_matches(text, list(named), n=3)
        examples = f"the model has e.g. {_first(layer_names)}"
        hint = f"did you mean {_first(close)}?" if close else examples
        raise LayerError(f"the model has no layer {text!r}; {hint}")
    return [(name, None) for name in names]


def matches_glob(name: str, pattern: str) -> bool:
    """Whether a dotted name matches: ``*`` within one level, ``**`` any number of levels.

    >>> matches_glob("encoder.0.attn", "encoder.*"), matches_glob("encoder.0.attn", "**.attn")
    (False, True)

    At the end of a pattern, ``**`` is one level or more.

    Args:
        name: qualified name of a module.
        pattern: the glob; each of its levels may also have ``?`` and ``[...]``.
    """
    return _levels_match(name.split("."), pattern.split("."))


def _levels_match(levels: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not levels
    if patterns[0] == "**":
        if len(patterns) == 1:
            return bool(levels)
        return any(_levels_match(levels[at:], patterns[1:]) for at in range(len(levels) + 1))
    matches_first = bool(levels) and fnmatchcase(levels[0], patterns[0])
    return matches_first and _levels_match(levels[1:], patterns[1:])


def _glob_hint(pattern: str, layer_names: Sequence[str]) -> str:
    """Return what to write instead of a glob that matches nothing."""
    rule = "'*' matches within one level and '**' matches any number of levels"
    deeper = ".".join("**" if level == "*" else level for level in pattern.split("."))
    for candidate in (deeper, f"**.{pattern}", f"{pattern}.**"):
        if any(matches_glob(name, candidate) for name in layer_names):
            return f"{rule}: write {candidate!r}"
    return f"{rule}; the model has e.g. {_first(layer_names)}"


def _selects(predicate: Callable[..., bool], name: str, module: nn.Module) -> bool:
    try:
        parameters = list(inspect.signature(predicate).parameters.values())
    except (TypeError, ValueError):  # built-in functions may have no signature
        parameters = []
    # That of operator.attrgetter("x") is (*args, **kwargs) in some releases of Python 3.12.
    wanted = sum(each.kind in _POSITIONAL for each in parameters)
    return bool(predicate(name, module) if wanted >= 2 else predicate(module))


def _first(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return f"{shown}, …" if len(names) > limit else shown


def format_labels(labels: Sequence[str], limit: int = 12) -> str:
    """Format labels for a message: at most ``limit`` of them, and how many more there are.

    >>> format_labels(["conv1", "conv2", "fc"], limit=2)
    'conv1, conv2 and 1 more'
    """
    shown = ", ".join(labels[:limit])
    return f"{shown} and {len(labels) - limit} more" if len(labels) > limit else shown


def positions_of(index: Any, labels: Sequence[str], kind: str) -> list[int]:
    """Return the positions of the rows or columns that an index selects.

    Args:
        index: a label, a position, a slice, or a list of labels and positions.
        labels: the labels of all rows or columns.
        kind: "row" or "column", for the messages of errors.

    Raises:
        LayerError: if a label or position does not exist.
        InputError: if the index is of another type.
    """
    if isinstance(index, slice):
        start, stop = index.start, index.stop
        if isinstance(start, str):
            start = _position(start, labels, kind)
        if isinstance(stop, str):
            stop = _position(stop, labels, kind) + 1
        return list(range(len(labels)))[start : stop : index.step]
    if isinstance(index, list):
        return [_position(label, labels, kind) for label in index]
    return [_position(index, labels, kind)]


def _position(index: Any, labels: Sequence[str], kind: str) -> int:
    """Return the position of one row or column, from 0."""
    if isinstance(index, str):
        if index in labels:
            return labels.index(index)
        close = difflib.get_close_matches(index, labels, n=3)
        raise LayerError(
            f"the result has no {kind} {index!r}; "
            + (
                f"did you mean {' or '.join(map(repr, close))}?"
                if close
                else f"it has {format_labels(labels)}"
            )
        )
    if not isinstance(index, int) or isinstance(index, bool):
        raise InputError(
            f"cannot select {kind}s by {index!r}; write a label, a position, a slice or a list, "
            'e.g. result["conv1", "fc"] or result[:, 2:5]'
        )
    if not -len(labels) <= index < len(labels):
        raise LayerError(
            f"{kind} {index} is out of range for a result with {len(labels)} {kind}s; "
            f"write a position from {-len(labels)} to {len(labels) - 1}"
        )
    return index % len(labels)
