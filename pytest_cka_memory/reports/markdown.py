"""The report as GitHub-flavoured Markdown, for a job summary or a pull request comment."""

import html
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.reports import cell, code, fence, one_line, sentence, shorten, summary
from pytest_cka_memory.reports.summary import Problem
from pytest_cka_memory.reports.tables import (
    by_alarm,
    cells,
    known_columns,
    legend_of,
    provenance_of,
)

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
