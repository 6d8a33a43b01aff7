"""``python -m pytest_cka_memory``: its subcommands on reports, laws, and tests on cards.

The other subcommands are in :mod:`.repair` and :mod:`.snapshots`.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from emulated_cuda import cards
from emulated_cuda.cards import CARDS, CONTEXT_BYTES, DEFAULT_CARD
from emulated_cuda.this_process import ended_by_signals
from pytest_cka_memory._version import __version__
from pytest_cka_memory.cli import repair, snapshots
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.two_reports import Comparison, compare
from pytest_cka_memory.core.verdicts import parse_tolerance
from pytest_cka_memory.errors import CkaMemoryError, DeviceError, ReportError
from pytest_cka_memory.meters import EMULATED
from pytest_cka_memory.repair.programs import split_script
from pytest_cka_memory.reports import cards as tables
from pytest_cka_memory.reports import comparison, files, markdown, one_line, terminal
from pytest_cka_memory.reports.cards import (
    FAILED,
    FITS,
    OUT_OF_MEMORY,
    CardUse,
    uses_of,
    with_peaks_elsewhere,
)
from pytest_cka_memory.reports.html import page as html_page
from pytest_cka_memory.reports.tables import choice_of
from pytest_cka_memory.stored.json_report import read, report_schema
from pytest_cka_memory.units import counted

OK, REGRESSION, UNUSABLE = 0, 1, 2
"""Exit statuses; argparse also exits with 2 if the command line is wrong."""

_COMPARISONS = {
    "table": lambda found: comparison.as_table(found, shutil.get_terminal_size().columns),
    "markdown": comparison.as_markdown,
    "json": comparison.as_json,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 1 for a regression, or 2 if the input cannot be used."""
    parser = _parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    script: list[str] = []
    if arguments[:1] == ["repair"]:
        arguments, script = split_script(arguments)
    args, more = parser.parse_known_args(arguments)
    if more and not args.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    args.more, args.script = more, script
    _escape_unprintable()
    try:
        with ended_by_signals():
            status: int = args.run(args)
        sys.stdout.flush()
    except CkaMemoryError as error:
        print(one_line(f"pytest_cka_memory: {error}"), file=sys.stderr)
        return UNUSABLE
    except BrokenPipeError:  # the reader has closed the pipe, like `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return status


def _escape_unprintable() -> None:
    """Escape characters that the terminal's encoding does not have, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pytest_cka_memory",
        description="Show and compare reports that pytest wrote with --cka-memory-json, "
        "and histories of --cka-memory-history; run tests on emulated cards; explain and "
        "replay recordings that torch wrote.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(takes_more=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="print a report as a table or as Markdown")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--format", choices=("table", "markdown"), default="table")
    show.add_argument(
        "--rows",
        help=(
            "number of rows, column to sort by, or both: 20, retained, 20:retained or all; "
            "default 100"
        ),
    )
    show.set_defaults(run=_show)

    versus = commands.add_parser(
        "compare",
        help="print the differences between two reports; exit with status 1 if a figure rose by "
        "more than the tolerance",
    )
    versus.add_argument("old", type=Path, metavar="OLD")
    versus.add_argument("new", type=Path, metavar="NEW")
    versus.add_argument(
        "--tolerance",
        default="5%",
        help="how far a figure may rise: 5%% (default), 64KiB or '5%% + 64 KiB'",
    )
    versus.add_argument("--format", choices=_COMPARISONS, default="table")
    versus.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help="also write an HTML page that compares what was live at each peak",
    )
    versus.set_defaults(run=_compare)

    page = commands.add_parser("html", help="write a report as a self-contained HTML page")
    page.add_argument("file", type=Path, metavar="FILE")
    page.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    page.set_defaults(run=_html)

    trend = commands.add_parser(
        "trend", help="print how figures changed over a history, and the commits at which they rose"
    )
    trend.add_argument(
        "file", type=Path, metavar="FILE", help="a file that pytest wrote with --cka-memory-history"
    )
    trend.add_argument(
        "--tolerance",
        default="1%",
        help="smallest change to print: 1%% (default), 64KiB or '1%% + 64 KiB'",
    )
    trend.add_argument("--all", action="store_true", help="also print figures that never changed")
    trend.add_argument("-o", "--output", type=Path, metavar="OUT", help="draw an SVG file too")
    trend.set_defaults(run=_trend)

    _add_cards(commands)
    snapshots.add_parsers(commands)
    repair.add_parser(commands)
    _add_law(commands)

    schema = commands.add_parser("schema", help="print the JSON Schema of reports")
    schema.set_defaults(run=_schema)
    return parser


def _show(args: argparse.Namespace) -> int:
    report = read(args.file)
    if args.format == "markdown":
        sys.stdout.write(markdown.render(report))
    else:
        width = shutil.get_terminal_size().columns
        choice = choice_of(args.rows) if args.rows else terminal.DEFAULT
        lines = terminal.section(report, width, choice)
        sys.stdout.write("".join(f"{line.text}\n" for line in lines))
    return OK


def _compare(args: argparse.Namespace) -> int:
    tolerance = parse_tolerance(args.tolerance)
    old, new = read(args.old), read(args.new)
    differences = compare(old, new, tolerance)
    if not differences.compared:
        raise ReportError(
            f"nothing to compare: no region ran to its end in both {args.old} "
            f"({counted(len(old.results), 'region')}) and {args.new} "
            f"({counted(len(new.results), 'region')}); use two reports of the same tests"
        )
    if args.html is not None:
        _write_comparison(args, old, new, differences)
    sys.stdout.write(_COMPARISONS[args.format](differences))
    return REGRESSION if differences.regressions else OK


def _write_comparison(
    args: argparse.Namespace, old: Report, new: Report, differences: Comparison
) -> None:
    from pytest_cka_memory.core.two_reports import peak_differences

    for source in (args.old, args.new):
        _refuse_same(source, args.html, "--html")
    peaks, unknown = peak_differences(old, new, differences)
    files.write_whole(args.html, comparison.as_html(differences, peaks, unknown))


def _html(args: argparse.Namespace) -> int:
    report = read(args.file)
    _refuse_same(args.file, args.output)
    files.write_whole(args.output, html_page.render(report))
    return OK


def _trend(args: argparse.Namespace) -> int:
    from pytest_cka_memory.stored import history, trend

    tolerance = parse_tolerance(args.tolerance)
    sessions = history.read(args.file)
    if not sessions:
        raise ReportError(
            f"cannot use {args.file}: it records no pytest session; run pytest with "
            "--cka-memory-history=PATH to add one"
        )
    if args.output is not None:
        _refuse_same(args.file, args.output)
        files.write_whole(args.output, trend.as_svg(sessions, tolerance))
    sys.stdout.write(trend.as_text(sessions, tolerance, every=args.all))
    return OK


def _refuse_same(source: Path, target: Path, option: str = "-o") -> None:
    if target.exists() and target.samefile(source):
        raise ReportError(f"{option}: {target} is the input file itself; write another path")


def _schema(_: argparse.Namespace) -> int:
    print(json.dumps(report_schema(), indent=1, ensure_ascii=False))
    return OK


def _add_law(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "law",
        help="print how the memory of a function grows with the sizes of its inputs",
        description="Run a function at several sizes in a separate process, on an emulated card "
        "without values. Print the law of its peak: a formula of the sizes, with the lines that "
        "allocate the memory.",
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
    parser.add_argument(
        "--device",
        help="measure on this device instead of an emulated card: cpu, cuda, or a full name such "
        "as emulate:cuda:h100,values=off",
    )
    parser.add_argument(
        "--of",
        default="peak",
        metavar="FIGURE",
        help="the figure whose growth to print: peak (default), retained, allocated, reserved or "
        "process",
    )
    parser.add_argument(
        "--at", nargs="+", default=(), metavar="NAME=VALUE", help="print the figure at these sizes"
    )
    parser.add_argument(
        "--largest",
        metavar="NAME",
        help="print the largest value of this size that fits the card; --at sets the other sizes",
    )
    parser.add_argument(
        "--fits",
        choices=CARDS,
        help="with --largest: the card that the step must fit on (default: the emulated card)",
    )
    parser.set_defaults(run=_law)


def _law(args: argparse.Namespace) -> int:
    from pytest_cka_memory.measure.law_processes import (
        ProcessTracebackError,
        find_law,
        target_of,
    )

    sizes, others = _sizes_given(args.sizes), _sizes_given(args.at)
    try:
        target = target_of(args.step, args.card, args.device)
        assert target is not None, "a name has a target"
        print(f"running {args.step} at several sizes", file=sys.stderr, flush=True)
        law = find_law(target, args.of, sizes)
        print(law)
        if others and (not args.largest or args.largest in others):
            print(law.at(**others))
            others.pop(args.largest, None)
        if args.largest:
            card = args.fits or args.card or DEFAULT_CARD
            largest = law.largest(args.largest, card=card, **others)
            print(f"largest {args.largest} on {card}: {largest:,} ({largest.how})")
    except Exception as error:  # what the step has raised, or wrong sizes
        if isinstance(error.__cause__, ProcessTracebackError):
            print(str(error.__cause__).strip(), file=sys.stderr)
        if isinstance(error, CkaMemoryError):
            raise
        raise ReportError(f"{type(error).__name__}: {error}") from None
    return 0


def _sizes_given(texts: Sequence[str]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for name, value in map(_size_given, texts):
        if name in sizes:
            raise ReportError(
                f"{name!r} is given twice; write all its values together, e.g. {name}=1,2,4"
            )
        sizes[name] = value
    return sizes


def _size_given(text: str) -> tuple[str, Any]:
    """Return name and value of ``batch=1,2,4``; a value that is no Python literal is a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ReportError(f"{text!r} is not a size; write NAME=VALUES, e.g. batch=1,2,4")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


_DEFAULT_CARDS = "t4,a10,a100,h100"
_CARD_FORMATS = {
    "markdown": tables.as_markdown,
    "json": tables.as_json,
    "html": tables.as_html,
}
_MOST_LINES_OF_PYTEST = 40


def _add_cards(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "cards",
        usage="%(prog)s [--cards NAMES] [--no-values] [--format FORMAT] [arguments of pytest ...]",
        help="run tests on emulated cards and print which test fits on which card; exit with "
        "status 1 if a test does not fit on a card",
        description="Run pytest once for each card, on an emulated device. All other arguments "
        "are passed to pytest, such as tests/test_train.py -k training.",
        allow_abbrev=False,
    )
    known = ", ".join(CARDS)
    parser.add_argument(
        "--cards",
        default=_DEFAULT_CARDS,
        help=f"names of cards, with commas between them; default: {_DEFAULT_CARDS}; known: {known}",
    )
    parser.add_argument(
        "--no-values", action="store_true", help="compute no values on the cards, which is faster"
    )
    parser.add_argument("--format", choices=_CARD_FORMATS, default="markdown")
    parser.set_defaults(run=_cards, takes_more=True)


def _cards(args: argparse.Namespace) -> int:
    """Run the sessions, print the table and return the exit status.

    Raises:
        DeviceError: if a card is not known.
        ReportError: if a session ended without a report, such as for a wrong argument of pytest.
    """
    cards = _checked_cards(args.cards)
    settings = ",values=off" if args.no_values else ""
    uses: list[CardUse] = []
    for number, card in enumerate(cards, 1):
        print(f"{card} ({number} of {len(cards)}): running", file=sys.stderr, flush=True)
        own = _session_on(card, f"{EMULATED}:{card}{settings}", args.more)
        print(f"{counted(len(own), 'test')}, {tables.verdict(own)}", file=sys.stderr, flush=True)
        uses += own
    sys.stdout.write(_CARD_FORMATS[args.format](with_peaks_elsewhere(uses)))
    return int(any(use.result in (OUT_OF_MEMORY, FAILED) for use in uses))


def _checked_cards(text: str) -> list[str]:
    cards = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in cards if name not in CARDS]
    if unknown:
        raise DeviceError(
            f"--cards: unknown card {unknown[0]!r}; write names from {', '.join(CARDS)}, with "
            f"commas between them, e.g. --cards {_DEFAULT_CARDS}"
        )
    return cards


def _session_on(card: str, device: str, arguments: Sequence[str]) -> list[CardUse]:
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
            print(*done.stdout.splitlines()[-_MOST_LINES_OF_PYTEST:], sep="\n", file=sys.stderr)
            raise ReportError(
                f"pytest ended on {card} with exit status {done.returncode}; its output is above. "
                "Correct the tests or the arguments of pytest, and run the command again"
            )
        usable_bytes = CARDS[card].total_bytes - CONTEXT_BYTES
        tests = ended_tests.read(ended)
        uses = uses_of(card, usable_bytes, read(report).results, tests.messages, tests.largest)
        return [replace(use, condition=_condition_of(use)) for use in uses]


def _condition_of(use: CardUse) -> str:
    """Return under which condition a test fits its card; empty if there is none."""
    if use.result != FITS:
        return ""
    card = CARDS[use.card]
    return cards.condition_to_fit(card, card.total_bytes - use.reserved_bytes)
