"""Which modules of a model are compared, and what their rows are called.

A row is a call: the first call of ``relu`` is labelled ``relu``, its second ``relu:1``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from cka.errors import LayerError

Selector: TypeAlias = str | int | type[nn.Module] | Callable[..., bool]
Layers: TypeAlias = Selector | Sequence[Selector] | None

# Never called themselves, so that naming them in a warning would only be noise.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Call(NamedTuple):
    """One call of a module within one forward pass."""

    name: str
    """Qualified name of the module, empty for the model itself."""
    number: int
    """0 for the first call."""

    @property
    def label(self) -> str:
        """Name of the row."""
        name = self.name or "(model)"
        return f"{name}:{self.number}" if self.number else name


@dataclass(frozen=True)
class Selection:
    """What was selected of one model."""

    modules: Mapping[str, nn.Module]
    """The modules to watch, by the names the rows will carry."""
    ranks: Mapping[tuple[str, int | None], int]
    """Which selector asked for a module (call None: all of its calls), for the order of rows."""

    def arrange(self, calls: Sequence[Call]) -> list[int]:
        """Positions of the selected calls: in the order of the selectors, then of execution."""
        ranked = [
            (rank, position)
            for position, call in enumerate(calls)
            if (rank := self._rank(call)) is not None
        ]
        return [position for _, position in sorted(ranked)]

    def _rank(self, call: Call) -> int | None:
        return self.ranks.get((call.name, call.number), self.ranks.get((call.name, None)))

    def idle(self, calls: Iterable[Call]) -> list[str]:
        """Labels of what was selected and is not among the calls."""
        seen = set(calls)
        names = {call.name for call in seen}
        return [
            Call(name, number or 0).label
            for name, number in self.ranks
            if (name not in names if number is None else Call(name, number) not in seen)
        ]


def select(model: nn.Module, layers: Layers) -> Selection:
    """Resolve a selection against a model.

    Args:
        model: whose modules are named.
        layers: a name (``"layer1.0.relu"``, or ``"layer1.0.relu:1"`` for its second call only),
            an index into the model's layers, a glob (``"layer?.*.conv1"``), a module type, a
            predicate of ``(module)`` or ``(name, module)``, or a sequence of these. None selects
            every module below the model itself.

    Raises:
        LayerError: if a selector names nothing; close matches are suggested.
    """
    if layers is None:
        selectors: Sequence[Any] = [nn.Module]
    elif isinstance(layers, (list, tuple)):
        selectors = layers
    else:
        selectors = [layers]
    if not selectors:
        raise LayerError("the layer selection is empty; leave it out to compare every layer")
    named = dict(model.named_modules(remove_duplicate=False))
    own = _layer_names(model)
    ranks: dict[tuple[str, int | None], int] = {}
    for rank, selector in enumerate(selectors):
        for found in _matches(selector, named, own):
            ranks.setdefault(found, rank)
    return Selection({name: named[name] for name, _ in ranks}, ranks)


def _layer_names(model: nn.Module) -> list[str]:
    """Modules an index counts: each once, without the model itself unless it is all there is."""
    names = [
        name
        for name, module in model.named_modules()
        if name and not isinstance(module, _CONTAINERS)
    ]
    return names or [""]


def _matches(
    selector: Any, named: Mapping[str, nn.Module], own: Sequence[str]
) -> list[tuple[str, int | None]]:
    if isinstance(selector, str):
        return _matching_names(selector, named, own)
    if isinstance(selector, int) and not isinstance(selector, bool):
        if not -len(own) <= selector < len(own):
            raise LayerError(
                f"layer index {selector} is out of range; the model has {len(own)} layers"
            )
        return [(own[selector], None)]
    if isinstance(selector, type):
        found = [name for name in own if isinstance(named[name], selector)]
    elif callable(selector):
        found = [name for name in own if _holds(selector, name, named[name])]
    else:
        raise LayerError(
            f"cannot select layers by {selector!r}; write a name, an index, a glob, a module type "
            "or a predicate"
        )
    if not found:
        described = getattr(selector, "__name__", repr(selector))
        raise LayerError(f"no layer matches {described}; the model has e.g. {_some(own)}")
    return [(name, None) for name in found]


def _matching_names(
    text: str, named: Mapping[str, nn.Module], own: Sequence[str]
) -> list[tuple[str, int | None]]:
    if text in named:
        return [(text, None)]
    name, _, number = text.rpartition(":")
    if name in named and number.isdecimal():
        return [(name, int(number))]
    found = [name for name in own if fnmatchcase(name, text)] if set(text) & set("*?[") else []
    if not found:
        close = difflib.get_close_matches(text, list(named), n=3)
        hint = f"did you mean {_some(close)}?" if close else f"the model has e.g. {_some(own)}"
        raise LayerError(f"the model has no layer {text!r}; {hint}")
    return [(name, None) for name in found]


def _holds(predicate: Callable[..., bool], name: str, module: nn.Module) -> bool:
    try:
        wanted = len(inspect.signature(predicate).parameters)
    except (TypeError, ValueError):  # builtins may have no signature
        wanted = 1
    return bool(predicate(name, module) if wanted >= 2 else predicate(module))


def _some(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return f"{shown}, …" if len(names) > most else shown


def listed(labels: Sequence[str], most: int = 12) -> str:
    """Labels for a message, cut short where there are very many."""
    shown = ", ".join(labels[:most])
    return f"{shown} and {len(labels) - most} more" if len(labels) > most else shown
