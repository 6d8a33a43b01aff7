"""``python -m pytest_cka_memory``: reports, tests on cards, and recordings that torch wrote."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_cka_memory._version import __version__
from pytest_cka_memory.cli import cards, law, repair, snapshots
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.tolerance import parse_tolerance
from pytest_cka_memory.core.two_reports import Comparison, compare
from pytest_cka_memory.errors import CkaMemoryError, ReportError
from pytest_cka_memory.repair.scripts import split_script
from pytest_cka_memory.reports import comparison, files, markdown, terminal
from pytest_cka_memory.reports.escapes import one_line
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
    given = list(sys.argv[1:] if argv is None else argv)
    script: list[str] = []
    if given[:1] == ["repair"]:
        given, script = split_script(given)
    args, more = parser.parse_known_args(given)
    if more and not args.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    args.more, args.script = more, script
    _escape_unprintable()
    try:
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
    show.add_argument("--rows", help="20, retained, 20:retained or all; default 100")
    show.set_defaults(run=_show)

    versus = commands.add_parser(
        "compare", help="print the differences; exit 1 if a figure rose by more than the tolerance"
    )
    versus.add_argument("old", type=Path, metavar="OLD")
    versus.add_argument("new", type=Path, metavar="NEW")
    versus.add_argument("--tolerance", default="5%", help="5%% (default), 64KiB, '5%% + 64 KiB'")
    versus.add_argument("--format", choices=_COMPARISONS, default="table")
    versus.add_argument(
        "--html", type=Path, metavar="OUT", help="write a page too, with what is new at the peaks"
    )
    versus.set_defaults(run=_compare)

    page = commands.add_parser("html", help="write a report as a self-contained HTML page")
    page.add_argument("file", type=Path, metavar="FILE")
    page.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    page.set_defaults(run=_html)

    trend = commands.add_parser(
        "trend", help="print how the figures of a history developed, and the commits they rose at"
    )
    trend.add_argument("file", type=Path, metavar="FILE", help="written by --cka-memory-history")
    trend.add_argument("--tolerance", default="1%", help="1%% (default), 64KiB, '1%% + 64 KiB'")
    trend.add_argument("--all", action="store_true", help="print figures that never changed too")
    trend.add_argument("-o", "--output", type=Path, metavar="OUT", help="draw an SVG file too")
    trend.set_defaults(run=_trend)

    cards.add_parser(commands)
    snapshots.add_parsers(commands)
    repair.add_parser(commands)
    law.add_parser(commands)

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
    found = compare(old, new, tolerance)
    if not found.compared:
        raise ReportError(
            f"nothing to compare: no region ran to its end in both {args.old} "
            f"({counted(len(old.results), 'region')}) and {args.new} "
            f"({counted(len(new.results), 'region')}); use two reports of the same tests"
        )
    if args.html is not None:
        _write_comparison(args, old, new, found)
    sys.stdout.write(_COMPARISONS[args.format](found))
    return REGRESSION if found.regressions else OK


def _write_comparison(
    args: argparse.Namespace, old: Report, new: Report, found: Comparison
) -> None:
    from pytest_cka_memory.core.two_reports import peak_differences

    for source in (args.old, args.new):
        _refuse_same(source, args.html, "--html")
    peaks, unknown = peak_differences(old, new, found)
    files.write_whole(args.html, comparison.as_html(found, peaks, unknown))


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
            f"cannot use {args.file}: it has no session; add one with pytest "
            "--cka-memory-history=PATH"
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
