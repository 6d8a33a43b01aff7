"""The report for GitHub: Markdown for a job summary or a comment, and annotations of lines.

Annotations are workflow commands:
https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import WARNED, Result
from pytest_cka_memory.reports import (
    cell,
    code,
    fence,
    one_line,
    sentence,
    shorten,
    summary,
)
from pytest_cka_memory.reports.summary import Problem
from pytest_cka_memory.reports.tables import (
    by_alarm,
    cells,
    known_columns,
    legend_of,
    provenance_of,
)
from pytest_cka_memory.units import counted

COMMENT_CHARACTERS = 65_000
"""GitHub accepts 65,536 in a comment; the rest is for lines that a workflow adds."""
JOB_SUMMARY_CHARACTERS = 2**18
"""GitHub accepts 1 MiB per step, and a character may be four bytes."""

_MOST_NAME = 160
_MOST_SENTENCE = 400
_MOST_FAILED = 10
_FRAME = 1_000
"""Room for headings, table heads and the lines that count what was left out."""


def render(report: Report, most_characters: int = COMMENT_CHARACTERS) -> str:
    """Return the verdict, the problems with their holders, and every region, folded away.

    The text has at most `most_characters`. What does not fit is counted in a line of its own.
    """
    named = (f"- {name}: {sentence(fact, _MOST_NAME)}" for name, fact in summary.facts(report))
    facts = "\n".join([*named, f"\n{legend_of(known_columns(report.results))}"])
    provenance = provenance_of(report.session)
    blocks = [f"### {provenance.heading}: {summary.verdict(report)}\n"]
    blocks += [f"{provenance.notice}\n"] if provenance.notice else []
    blocks += [f"**FAILED**: {sentence(problem)}\n" for problem in report.problems[:_MOST_FAILED]]
    room = most_characters - len(facts) - _FRAME
    problems = list(summary.problems(report.results))
    blocks += [*_problems(problems, room // 2), *_holders(problems, room // 4)]
    blocks += _regions(report, room - sum(len(block) + 1 for block in blocks))
    return "\n".join([*blocks, facts]).rstrip() + "\n"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    room: int,
    *,
    left: int,
    tests: Sequence[str] = (),
) -> list[str]:
    """Return the rows that fit in `room` characters, and how many did not.

    Args:
        head: the titles of the columns.
        rows: Markdown for each cell of each row.
        room: characters of all rows.
        left: how many columns are aligned to the left; those after them are figures.
        tests: the test of each row. A table that is cut then has one row of each test before any
            has a second.
    """
    top = [_row(head), _row([*[":---"] * left, *["---:"] * (len(head) - left)])]
    lines = list(map(_row, rows))
    if tests and sum(len(line) + 1 for line in lines) > room:
        pairs = summary.first_of_each(zip(tests, lines, strict=True), lambda pair: pair[0])
        lines = [line for _, line in pairs]
    return [*top, *_fitting(lines, room), ""]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(cell, cells))} |"


def _fitting(lines: Iterable[str], room: int) -> Iterator[str]:
    """Yield `lines` while they fit in `room` characters, then a line that counts the rest."""
    rest = iter(lines)
    for line in rest:
        room -= len(line) + 1
        if room < 0:
            left = sum(1 for _ in chain([line], rest))
            yield _row([f"and {left:,} more, in the JSON report"])
            return
        yield line


def _problems(problems: Sequence[Problem], room: int) -> list[str]:
    rows = (
        (
            f"**{problem.verdict}**" if problem.verdict == "BREACH" else problem.verdict,
            code(problem.result.name),
            ": ".join(
                [*([code(problem.limit)] if problem.limit else []), sentence(problem.sentence)]
            ),
        )
        for problem in problems
    )
    tests = [problem.result.nodeid for problem in problems]
    return table(("verdict", "region", "why"), rows, room, left=3, tests=tests) if problems else []


def _holders(problems: Sequence[Problem], room: int) -> Iterator[str]:
    explained = [problem for problem in problems if problem.explains]
    explained = summary.first_of_each(explained, lambda problem: problem.result.nodeid)
    for number, problem in enumerate(explained):
        block = "\n".join(_explanation(problem))
        room -= len(block)
        if room < 0:
            yield f"The holders of {len(explained) - number:,} more are in the JSON report.\n"
            return
        yield block


def _explanation(problem: Problem) -> Iterator[str]:
    name, limit = (
        f"<code>{html.escape(shorten(one_line(text), _MOST_NAME))}</code>"
        for text in (problem.result.name, problem.limit)
    )
    lines = [shorten(one_line(line), _MOST_SENTENCE) for line in problem.holders]
    marks = fence("\n".join(lines), least=3)
    yield f"<details><summary>{name}, {limit}: who holds it</summary>\n"
    yield from [f"{marks}text", *lines, marks, ""]
    yield "</details>\n"


def _regions(report: Report, room: int) -> list[str]:
    if not report.results:
        return []
    columns = known_columns(report.results)
    rows = [
        {"region": code(result.name), **cells(result, columns)}
        for result in by_alarm(report.results)
    ]
    # Words come first, because figures are aligned to the right.
    words = ["region", "verdict", "timeline"]
    head = words + [column for column in rows[0] if column not in words]
    return [
        f"<details><summary>All regions: {len(rows):,}</summary>\n",
        *table(head, ([row[column] for column in head] for row in rows), room, left=len(words)),
        "</details>\n",
    ]


MOST_PER_KIND = 10
"""GitHub shows only the first ten of each kind per step."""

_MOST_LINES = 14
_MOST_LINE = 400
_EXCUSED = ("xfailed", "xpassed", "skipped")
PathOf = Callable[[str], str | None]


def annotations(report: Report, path_of: PathOf) -> list[str]:
    """Return one command per line: errors for failures, worst first, then warnings.

    Every test that failed has one before any test has a second.

    Args:
        report: the session.
        path_of: returns the path in the repository of a test's file, or None.
    """
    errors = [command("error", text, title="memory gate failed") for text in report.problems]
    errors += _breaches(report, path_of, "BREACH", "error")
    broken = _breaches(report, path_of, WARNED, "warning")
    warnings = [*broken, *_warnings(report, path_of)]
    return [*_bounded(errors, "error"), *_bounded(warnings, "warning")]


def command(kind: str, message: str, **properties: object) -> str:
    """Return one workflow command, without the properties that are None.

    Args:
        kind: ``error`` or ``warning``.
        message: any text; may have several lines.
        properties: such as ``file``, ``line`` and ``title``.
    """
    pairs = [
        f"{key}={_escaped_property(str(value))}"
        for key, value in properties.items()
        if value is not None
    ]
    return f"::{kind} {','.join(pairs)}::{_escaped(message)}"


def _escaped(message: str) -> str:
    """Escape the message of an annotation, which must be one line."""
    return message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    """Escape a property of an annotation, which a comma or a colon would end."""
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def _breaches(report: Report, path_of: PathOf, verdict: str, kind: str) -> Iterator[str]:
    broken = [
        problem
        for problem in summary.problems(report.results)
        if problem.verdict == verdict and problem.result.outcome not in _EXCUSED
    ]
    adjective = provenance_of(report.session).adjective
    source = f" ({adjective})" if adjective else ""
    broken.sort(key=_excess_bytes, reverse=True)
    for problem in summary.first_of_each(broken, lambda problem: problem.result.nodeid):
        alone = problem._replace(earlier=())  # each annotation is read without the others
        lines = [f"{problem.result.name}: {problem.sentence}", *_first_groups(alone.holders)]
        message = "\n".join(shorten(one_line(line), _MOST_LINE) for line in lines)
        place = _place(problem.result, report, path_of)
        yield command(kind, message, **place, title=f"{one_line(problem.limit)} broken{source}")


def _first_groups(lines: Sequence[str]) -> list[str]:
    """Return the groups of lines that fit, but at least two, and the line with their share.

    The first may be the bars of a loop's levels; the next one is the largest cause.
    """
    starts = [number for number, line in enumerate(lines) if not line.startswith("   ")]
    ends = [*starts[1:], len(lines)]
    for shown, (start, end) in enumerate(zip(starts, ends, strict=False)):
        if shown > 1 and end > _MOST_LINES:
            share = (line for line in lines[start:] if line.startswith("  explains"))
            return [*lines[:start], "  and more, in the message of the test", *share]
    return list(lines)


def _excess_bytes(problem: Problem) -> float:
    """Return the bytes above the limit, over all batches; infinite if it was not judged."""
    breach = next(each for each in problem.result.breaches if each.message == problem.sentence)
    if breach.measured_bytes is None:
        return math.inf
    per_batch = breach.figure == "growth_bytes_per_batch"
    factor = problem.result.record.batches if per_batch else 1
    return (breach.measured_bytes - breach.allowed_bytes) * factor


def _place(result: Result, report: Report, path_of: PathOf) -> dict[str, object]:
    file, line = report.locations.get(result.nodeid, (None, None))
    path = None if file is None else path_of(file)
    return {"file": path, "line": line} if path is not None else {}


def _warnings(report: Report, path_of: PathOf) -> Iterator[str]:
    for limit, reason, regions in summary.not_judged(report.results):
        message, what = f"{reason} ({counted(len(regions), 'region')})", limit
        if not limit:
            message, what = f"{one_line(regions[0].name)}: {reason}", "memory"
        place = _place(regions[0], report, path_of)
        yield command("warning", message, **place, title=f"{what} not judged")
    for reason, count in report.unmeasured.items():
        yield command("warning", f"{counted(count, 'test')}: {reason}", title="memory not measured")
    if report.missing:
        more = len(report.missing) - _MOST_LINES
        names = [*map(one_line, report.missing[:_MOST_LINES])]
        names += [f"and {more:,} more"] if more > 0 else []
        number = f"{counted(len(report.missing), 'test')} without a result"
        yield command("warning", "\n".join(names), title=f"memory: {number}")


def _bounded(commands: Sequence[str], kind: str) -> Iterable[str]:
    if len(commands) <= MOST_PER_KIND:
        return commands
    shown = commands[: MOST_PER_KIND - 1]
    rest = f"and {len(commands) - len(shown):,} more, in the job's summary"
    return [*shown, command(kind, rest, title="memory")]
