"""CPU forms of operators that only CUDA has, or that return more on CUDA: the table of all.

Each function gets CPU aliases of the operator's arguments, under their names in its schema, and
returns what the operator would have written. :func:`equivalent` enters it into the table and names
the source of its formula. The modules of this package have the functions;
:mod:`emulated_cuda.values.registration` imports them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from emulated_cuda.torch_private import schema_of

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Equivalent:
    """How an operator that only CUDA has is computed."""

    function: Callable[..., Any]
    """Gets the arguments that it has parameters for, by their names in the operator's schema."""
    source: str
    """Where the formula is from: a file of PyTorch's, with the function if the file has several."""


EQUIVALENTS: dict[str, Equivalent] = {}
"""Name of an operator -> how it is computed; filled by the modules of this package."""


def equivalent(*names: str, source: str) -> Callable[[Function], Function]:
    """Return a decorator that enters a function into the table for the operators `names`."""

    def enter(function: Function) -> Function:
        for name in names:
            EQUIVALENTS[name] = Equivalent(function, source)
        return function

    return enter


def by_name(operator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes all arguments of an operator in the order of its schema.

    It passes those that `function` has parameters for. If `function` has a parameter ``**others``,
    that gets the keyword-only arguments which are left, among them those of newer torch versions.
    """
    arguments = schema_of(operator).arguments
    names = [argument.name for argument in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    parameters = inspect.signature(function).parameters.values()
    wanted = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
    if len(wanted) < len(parameters):
        wanted.update(argument.name for argument in arguments if argument.kwarg_only)

    def call(*args: Any, **kwargs: Any) -> Any:
        by_parameter = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        return function(**{name: value for name, value in by_parameter.items() if name in wanted})

    return call
