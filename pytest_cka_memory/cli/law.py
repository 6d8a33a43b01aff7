"""``python -m pytest_cka_memory law``: how the memory of a function grows with its sizes."""

import argparse
import ast
import sys
from collections.abc import Sequence
from typing import Any

from emulated_cuda.cards import CARDS, DEFAULT_CARD
from pytest_cka_memory.errors import CkaMemoryError, ReportError


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "law",
        help="print how the memory of a function grows with its sizes",
        description="Run a function at some sizes in a process of its own, on an emulated card "
        "without values, and print the law of its peak with the lines that make it.",
        allow_abbrev=False,
    )
    parser.add_argument("step", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    parser.add_argument(
        "sizes",
        nargs="+",
        metavar="NAME=VALUES",
        help="batch=1,2,4 for a size that varies, and name=value for other arguments",
    )
    parser.add_argument("--card", choices=CARDS, help=f"the emulated card; default: {DEFAULT_CARD}")
    parser.add_argument("--device", help="another device: cpu, cuda, or emulate:cuda:... in full")
    parser.add_argument(
        "--of",
        default="peak",
        metavar="FIGURE",
        help="retained, allocated, reserved or process; default: peak",
    )
    parser.add_argument(
        "--at", nargs="+", default=(), metavar="NAME=VALUE", help="print the figure at these sizes"
    )
    parser.add_argument(
        "--largest",
        metavar="NAME",
        help="print the largest value of this size that fits the card; --at gives the others",
    )
    parser.add_argument("--fits", choices=CARDS, help="fits this card instead")
    parser.set_defaults(run=_law)


def _law(args: argparse.Namespace) -> int:
    from pytest_cka_memory.measure.law_processes import (
        ProcessTracebackError,
        find_law,
        target_of,
    )

    sizes, others = _arguments(args.sizes), _arguments(args.at)
    try:
        target = target_of(args.step, args.card, args.device)
        assert target is not None, "a name has a target"
        law = find_law(target, args.of, sizes)
        print(law)
        if others and not args.largest:
            print(law.at(**others))
        if args.largest:
            card = args.fits or args.card or DEFAULT_CARD
            found = law.largest(args.largest, card=card, **others)
            print(f"largest {args.largest} on {card}: {found:,} ({found.how})")
    except Exception as error:  # what the step has raised, or wrong sizes
        if isinstance(error.__cause__, ProcessTracebackError):
            print(str(error.__cause__).strip(), file=sys.stderr)
        if isinstance(error, CkaMemoryError):
            raise
        raise ReportError(f"{type(error).__name__}: {error}") from None
    return 0


def _arguments(texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in map(_argument, texts):
        if name in found:
            raise ReportError(f"{name!r} is given twice; write all its values once, as in 1,2,4")
        found[name] = value
    return found


def _argument(text: str) -> tuple[str, Any]:
    """Return name and value of ``batch=1,2,4``; a value that is no Python literal is a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ReportError(f"{text!r} is not a size; write NAME=VALUES, e.g. batch=1,2,4")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
