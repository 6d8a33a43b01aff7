"""How much memory a function takes on a card: it is run on an emulated one, not computed."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulated_cuda.cards import CARDS, CONTEXT_BYTES, DEFAULT_CARD, Card, card_of, condition_to_fit
from emulated_cuda.errors import DeviceError
from emulated_cuda.this_process import ended_by_signals

_MEASURES = "pytest_cka_memory.cli.named_functions"
"""The module that measures, which is not imported here: it runs in the other process."""
_LARGER = 32
"""How many times the memory of a card is emulated to find how much a function needs."""
_MB = 2**20
_LAST = 2000
"""Characters of the other process's output that an error shows."""


@dataclass(frozen=True)
class Estimate:
    """What a function took on an emulated card, in bytes."""

    function: str
    arguments: Mapping[str, Any]
    card: str
    usable_bytes: int
    """What torch's allocator can have: the memory of the card without the CUDA context."""
    peak_bytes: int
    """The highest level of the allocator's blocks in use."""
    reserved_bytes: int
    """The highest reserve of the allocator."""
    fits: bool
    """Whether the function ran on the card. If not, it was run with more memory for the figures."""
    by_kind: Mapping[str, int] = field(default_factory=dict)
    """What was live at the peak: ``parameters``, ``activations``, ...; largest first."""

    @property
    def head_room_bytes(self) -> int:
        """How much more the allocator could have reserved; less than 0 if it does not fit."""
        return self.usable_bytes - (self.reserved_bytes if self.fits else self.needed_bytes)

    @property
    def needed_bytes(self) -> int:
        """The reserve; if the function does not fit, what it took with more memory."""
        return max(self.reserved_bytes, self.peak_bytes)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        room = self.head_room_bytes
        fits = (
            f"fits, {_mb(room)} headroom"
            if self.fits
            else f"does not fit, {_mb(-room)} missing"
            if room < 0
            else "does not fit, because free blocks are too small or too far apart"
        )
        lines = [
            f"{self.function}({arguments}) on an emulated {CARDS[self.card].title}: {fits}",
            f"  peak      {_mb(self.peak_bytes)}",
            f"  reserved  {_mb(self.reserved_bytes)} of {_mb(self.usable_bytes)}",
        ]
        lines += [f"    {kind:<12}{_mb(size):>14}" for kind, size in self.by_kind.items()]
        left = room + CONTEXT_BYTES
        if self.fits and (needed := condition_to_fit(CARDS[self.card], left)):
            lines.append(f"  fits      {needed}")
        return "\n".join(lines)


def _mb(size: int) -> str:
    return f"{size / _MB:,.1f} MB"


def estimate(
    function: str,
    *,
    card: str = DEFAULT_CARD,
    calls: int = 2,
    values: bool = False,
    **arguments: Any,
) -> Estimate:
    """Run a function on an emulated card and return the memory that it took.

    It runs in a process of its own, so this works where torch is loaded already, such as in a
    notebook. The file of the function is run there too, and what that allocates counts::

        >>> emulated_cuda.estimate("train.py:step", batch=8, card="a10")  # doctest: +SKIP

    Args:
        function: ``"FILE.py:FUNCTION"``, or ``"MODULE:FUNCTION"``.
        card: the name of a card.
        calls: how often it is called: an optimizer allocates its state in the first call, and the
            peak of the second has both.
        values: whether values are computed, which takes longer; needed if sizes depend on them.
        **arguments: of the function: numbers, texts, and lists or dicts of them.

    Returns:
        Whether it fits, with the peak, the reserve, and the peak by kind of memory, in bytes.

    Raises:
        DeviceError: if the card is unknown, there is no such function, or it raises an exception.
        TypeError: if an argument cannot be passed to another process.
    """
    try:
        arguments_text = json.dumps(arguments)
    except TypeError as error:
        raise TypeError(
            "estimate() cannot pass the arguments to the process that runs the function: "
            f"{error}; pass only numbers, strings, lists and dicts"
        ) from None
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise DeviceError(
            f"estimate() got calls={calls!r}; write a whole number of at least 1, e.g. calls=2"
        )
    wanted = card_of(card)
    measured = _run(function, wanted, calls, values, arguments_text)
    fits = not measured["ran_out"]
    if not fits:
        measured = _run(
            function, wanted, calls, values, arguments_text, _LARGER * wanted.total_bytes
        )
    return Estimate(
        function,
        dict(arguments),
        card,
        wanted.total_bytes - CONTEXT_BYTES,
        measured["peak_bytes"],
        measured["reserved_bytes"],
        fits,
        measured["by_kind"],
    )


def _run(
    function: str, card: Card, calls: int, values: bool, arguments_text: str, total_bytes: int = 0
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="emulated-cuda-") as folder:
        path = Path(folder, "estimate.json")
        options = ["--card", card.name]
        options += [] if values else ["--no-values"]
        options += ["--memory", f"{total_bytes // _MB}MB"] if total_bytes else []
        command = [sys.executable, "-m", "emulated_cuda", *options, "-m", _MEASURES]
        run = subprocess.run(
            [*command, "estimate", str(path), function, str(calls), arguments_text],
            capture_output=True,
            text=True,
            check=False,
        )
        if not path.exists():
            output = (run.stderr or run.stdout).strip()[-_LAST:]
            raise DeviceError(
                f"estimate(): the process that ran {function!r} ended without a result. The end of "
                f"its output: {output}"
            )
        answer: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if "error" in answer:
        remedy = "; pass values=True" if "StaleValueError" in answer["error"] else ""
        raise DeviceError(f"estimate(): {answer['error']}{remedy}")
    return answer


def main(arguments: Sequence[str]) -> int:
    """Print the estimate of a function; return 0 if it fits and 1 if it does not.

    Args:
        arguments: as ``sys.argv[2:]`` of ``python -m emulated_cuda estimate``.
    """
    reader = argparse.ArgumentParser(
        prog="python -m emulated_cuda estimate",
        description="Run a function on an emulated card, and print the memory that it took. The "
        "exit status is 1 if it does not fit.",
        allow_abbrev=False,
    )
    reader.add_argument("function", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    reader.add_argument(
        "arguments", nargs="*", metavar="NAME=VALUE", help="arguments of the function, e.g. batch=8"
    )
    reader.add_argument("--card", choices=CARDS, default=DEFAULT_CARD)
    reader.add_argument(
        "--calls", type=int, default=2, metavar="N", help="how many times to call it (default: 2)"
    )
    reader.add_argument(
        "--values", action="store_true", help="compute the values of tensors, which takes longer"
    )
    options = reader.parse_intermixed_args(arguments)
    try:
        passed = dict(_argument(text) for text in options.arguments)
        with ended_by_signals():
            estimated = estimate(
                options.function,
                card=options.card,
                calls=options.calls,
                values=options.values,
                **passed,
            )
    except DeviceError as error:
        reader.error(str(error))
    print(estimated)
    return 0 if estimated.fits else 1


def _argument(text: str) -> tuple[str, Any]:
    """Return name and value of ``batch=8``; a value that is no Python literal is a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise DeviceError(f"{text!r} is not an argument; write NAME=VALUE, e.g. batch=8")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
