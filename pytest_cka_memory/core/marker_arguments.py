"""The arguments that every marker takes, and a marker as its user has written it."""

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_cka_memory.errors import LimitError

SCOPES = ("function", "class", "module")
"""What a limit can be judged over; the first is the default."""


def only_warns(kwargs: Mapping[str, Any]) -> bool:
    """Return the argument ``warn`` of a marker, which is False by default.

    Raises:
        LimitError: if it is neither True nor False.
    """
    warns = kwargs.get("warn", False)
    if not isinstance(warns, bool):
        raise LimitError(f"warn={warns!r}: write True or False")
    return warns


def scope_of(kwargs: Mapping[str, Any]) -> str:
    """Return the argument ``scope`` of a marker, which is ``function`` by default.

    Raises:
        LimitError: if there is no such scope.
    """
    scope = kwargs.get("scope", SCOPES[0])
    if scope not in SCOPES:
        raise LimitError(f"scope={scope!r}: write one of {', '.join(map(repr, SCOPES))}")
    return str(scope)


def with_argument(text: str, argument: str) -> str:
    """Return a limit as its user has written it, with one more argument: ``warn=True``."""
    start, bracket, arguments = text.partition("(")
    return f"{start}({arguments[:-1]}, {argument})" if bracket else f"{start}({argument})"


def call_text(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a marker as its user has written it, such as ``max_peak_mb(limit=-1)``."""
    given = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{name}({', '.join(given)})"
