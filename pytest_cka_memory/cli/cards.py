"""``python -m pytest_cka_memory cards``: run tests on emulated cards, each in its own process."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from emulated_cuda import outside_reserve
from emulated_cuda.cards import CARDS, CONTEXT_BYTES
from pytest_cka_memory.errors import DeviceError, ReportError
from pytest_cka_memory.meters.device_names import EMULATED
from pytest_cka_memory.reports import cards as tables
from pytest_cka_memory.reports.cards import (
    FAILED,
    FITS,
    OUT_OF_MEMORY,
    CardUse,
    uses_of,
    with_peaks_elsewhere,
)
from pytest_cka_memory.stored.json_report import read
from pytest_cka_memory.units import counted

DEFAULT = "t4,a10,a100,h100"
_FORMATS = {
    "markdown": tables.as_markdown,
    "json": tables.as_json,
    "html": tables.as_html,
}
_MOST_LINES = 40


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "cards",
        usage="%(prog)s [--cards NAMES] [--no-values] [--format FORMAT] [arguments of pytest ...]",
        help="run tests on emulated cards and print what fits; exit 1 if a test does not",
        description="Run pytest once for each card, on an emulated device. All other arguments "
        "are passed to pytest, such as tests/test_train.py -k training.",
        allow_abbrev=False,
    )
    known = ", ".join(CARDS)
    parser.add_argument("--cards", default=DEFAULT, help=f"default: {DEFAULT}; known: {known}")
    parser.add_argument(
        "--no-values", action="store_true", help="compute nothing on the cards, which is faster"
    )
    parser.add_argument("--format", choices=_FORMATS, default="markdown")
    parser.set_defaults(run=run, takes_more=True)


def run(args: argparse.Namespace) -> int:
    """Run the sessions, print the table and return the exit status.

    Raises:
        DeviceError: if a card is not known.
        ReportError: if a session ended without a report, such as for a wrong argument of pytest.
    """
    cards = _checked(args.cards)
    settings = ",values=off" if args.no_values else ""
    uses: list[CardUse] = []
    for number, card in enumerate(cards, 1):
        print(f"{card} ({number} of {len(cards)}): running", file=sys.stderr, flush=True)
        own = _session(card, f"{EMULATED}:{card}{settings}", args.more)
        print(f"{counted(len(own), 'test')}, {tables.verdict(own)}", file=sys.stderr, flush=True)
        uses += own
    sys.stdout.write(_FORMATS[args.format](with_peaks_elsewhere(uses)))
    return int(any(use.result in (OUT_OF_MEMORY, FAILED) for use in uses))


def _checked(text: str) -> list[str]:
    cards = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in cards if name not in CARDS]
    if unknown:
        raise DeviceError(
            f"--cards: unknown card {unknown[0]!r}; write names from {', '.join(CARDS)}, with "
            f"commas between them, e.g. --cards {DEFAULT}"
        )
    return cards


def _session(card: str, device: str, arguments: Sequence[str]) -> list[CardUse]:
    """Run pytest on one card and return what its tests used."""
    from pytest_cka_memory.integrations import ended_tests  # imports pytest, which takes a while

    with tempfile.TemporaryDirectory(prefix="pytest-cka-memory-cards-") as folder:
        report, ended = Path(folder, "report.json"), Path(folder, "ended.json")
        command = [
            *(sys.executable, "-m", "pytest", "-p", ended_tests.__name__, *arguments),
            *(f"--cka-memory-device={device}", f"--cka-memory-json={report}"),
            "--cka-memory-report",  # measures every test
        ]
        done = subprocess.run(
            command,
            env={**os.environ, ended_tests.VARIABLE: str(ended)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode not in (0, 1) or not report.exists() or not ended.exists():
            print(*done.stdout.splitlines()[-_MOST_LINES:], sep="\n", file=sys.stderr)
            raise ReportError(
                f"pytest ended on {card} with exit status {done.returncode}; its output is above. "
                "Correct the tests or the arguments of pytest, and run the command again"
            )
        usable_bytes = CARDS[card].total_bytes - CONTEXT_BYTES
        tests = ended_tests.read(ended)
        uses = uses_of(card, usable_bytes, read(report).results, tests.messages, tests.largest)
        return [replace(use, condition=_condition(use)) for use in uses]


def _condition(use: CardUse) -> str:
    """Return under which condition a test fits its card; empty if there is none."""
    if use.result != FITS:
        return ""
    card = CARDS[use.card]
    return outside_reserve.condition(card, card.total_bytes - use.reserved_bytes)
