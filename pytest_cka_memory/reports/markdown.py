"""The report as GitHub-flavoured Markdown: for a job's summary or a comment on a pull request."""

import html
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from pytest_cka_memory.core.verdicts import Report
from pytest_cka_memory.reports import summary, terminal
from pytest_cka_memory.reports.escapes import cell, code, fence, one_line, said, shorten
from pytest_cka_memory.reports.summary import Problem

COMMENT_CHARACTERS = 65_000
"""GitHub takes 65,536 in a comment; some are left for whoever adds a line of their own."""
JOB_SUMMARY_CHARACTERS = 2**18
"""GitHub takes 1 MiB of a step, and a character may be four bytes."""

_MOST_NAME = 160
_MOST_SENTENCE = 400
_MOST_FAILED = 10
_FRAME = 1_000
"""For headings, heads of tables and the lines that count what was left out."""


def text(report: Report, most_characters: int = COMMENT_CHARACTERS) -> str:
    """Verdict, then what needs a look and who holds it, then every region, folded away.

    At most `most_characters` long: what does not fit is counted, never dropped in silence.
    """
    facts = "\n".join(_facts(report))
    predicted = summary.is_predicted(report.session)
    blocks = [f"### {'Predicted memory' if predicted else 'Memory'}: {summary.verdict(report)}\n"]
    blocks += [f"{summary.PREDICTED}\n"] if predicted else []
    blocks += [f"**FAILED**: {said(problem)}\n" for problem in report.problems[:_MOST_FAILED]]
    room = most_characters - len(facts) - _FRAME
    problems = list(summary.problems(report.results))
    blocks += [*_problems(problems, room // 2), *_holders(problems, room // 4)]
    blocks += _regions(report, room - sum(len(block) + 1 for block in blocks))
    return "\n".join([*blocks, facts]).rstrip() + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], room: int, *, left: int) -> list[str]:
    """Rows that fit in `room` characters, then how many did not; the first `left` columns words."""
    lines = [_row(head), _row([*[":---"] * left, *["---:"] * (len(head) - left)])]
    return [*lines, *_fitting(map(_row, rows), room), ""]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(cell, cells))} |"


def _fitting(lines: Iterable[str], room: int) -> Iterator[str]:
    """Yield `lines` while they fit in `room` characters, then one that counts the rest."""
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
            ": ".join([*([code(problem.limit)] if problem.limit else []), said(problem.sentence)]),
        )
        for problem in problems
    )
    return table(("verdict", "region", "why"), rows, room, left=3) if problems else []


def _holders(problems: Sequence[Problem], room: int) -> Iterator[str]:
    told = [problem for problem in problems if problem.explains]
    for number, problem in enumerate(told):
        block = "\n".join(_explanation(problem))
        room -= len(block)
        if room < 0:
            yield f"Who holds the rest, {len(told) - number:,} more, is in the JSON report.\n"
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
    has_reserve = terminal.any_reserve(report.results)
    rows = [
        {"region": code(result.name), **terminal.cells(result, has_reserve=has_reserve)}
        for result in report.results
    ]
    # Words to the left of the figures, which line up on the right.
    words = ["region", "verdict", "timeline"]
    order = words + [column for column in rows[0] if column not in words]
    cells = ([row[column] for column in order] for row in rows)
    total = len(report.results)
    return [
        f"<details><summary>All regions: {total:,}</summary>\n",
        *table(order, cells, room, left=len(words)),
        "</details>\n",
    ]


def _facts(report: Report) -> Iterator[str]:
    for name, fact in summary.facts(report):
        yield f"- {name}: {said(fact, _MOST_NAME)}"
    yield f"\n{summary.LEGEND}"
