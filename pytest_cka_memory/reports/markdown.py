"""The report as GitHub-flavoured Markdown: for a job's summary or a comment on a pull request."""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from pytest_cka_memory.reports import summary, terminal
from pytest_cka_memory.reports.summary import Problem, one_line
from pytest_cka_memory.results import Report

COMMENT_CHARACTERS = 65_000
"""GitHub takes 65,536 in a comment; some are left for whoever adds a line of their own."""
JOB_SUMMARY_CHARACTERS = 2**18
"""GitHub takes 1 MiB of a step, and a character may be four bytes."""

_MOST_NAME = 160
_MOST_SENTENCE = 400
_FRAME = 1_000
"""For headings, heads of tables and the lines that count what was left out."""
_PLAIN = re.compile(r"(?!.*www\.)[A-Za-z0-9 ,.;:'()/%–-]*")
_FENCE = re.compile(r"`+")


def text(report: Report, most_characters: int = COMMENT_CHARACTERS) -> str:
    """Verdict, then what needs a look and who holds it, then every region, folded away.

    At most `most_characters` long: what does not fit is counted, never dropped in silence.
    """
    facts = "\n".join(_facts(report))
    predicted = summary.is_predicted(report.session)
    blocks = [f"### {'Predicted memory' if predicted else 'Memory'}: {summary.verdict(report)}\n"]
    blocks += [f"{summary.PREDICTED}\n"] if predicted else []
    room = most_characters - len(facts) - _FRAME
    problems = list(summary.problems(report.results))
    blocks += [*_problems(problems, room // 2), *_holders(problems, room // 4)]
    blocks += _regions(report, room - sum(len(block) + 1 for block in blocks))
    return "\n".join([*blocks, facts]).rstrip() + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], room: int, *, left: int) -> list[str]:
    """Rows that fit in `room` characters, then how many did not; the first `left` columns words."""
    lines = [_row(head), _row([*[":---"] * left, *["---:"] * (len(head) - left)])]
    return [*lines, *_fitting(map(_row, rows), room), ""]


def code(text: str, most: int = _MOST_NAME) -> str:
    """`text` as a code span on one line, where nothing in it is markup, a link or a mention."""
    shown = shorten(one_line(text), most)
    fence = _fence(shown)
    pad = " " if shown[:1] in ("`", " ", "") or shown[-1:] in ("`", " ") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _fence(text: str) -> str:
    return "`" * (1 + max(map(len, _FENCE.findall(text)), default=0))


def said(text: str, most: int = _MOST_SENTENCE) -> str:
    """A sentence as it is where it has no markup, else as a code span."""
    return text if _PLAIN.fullmatch(text) and len(text) <= most else code(text, most)


def shorten(text: str, most: int) -> str:
    """Cut out of the middle: a name begins with its file and ends with its parameters."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


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
    told = [problem for problem in problems if problem.holders]
    for number, problem in enumerate(told):
        block = "\n".join(_explanation(problem))
        room -= len(block)
        if room < 0:
            yield f"Who holds the rest, {len(told) - number:,} more, is in the JSON report.\n"
            return
        yield block


def _explanation(problem: Problem) -> Iterator[str]:
    name, limit = shorten(one_line(problem.result.name), _MOST_NAME), one_line(problem.limit)
    lines = [shorten(one_line(line), _MOST_SENTENCE) for line in problem.holders]
    fence = max(_fence("\n".join(lines)), "```", key=len)
    yield (
        f"<details><summary><code>{html.escape(name)}</code>, "
        f"<code>{html.escape(shorten(limit, _MOST_NAME))}</code>: what holds it</summary>\n"
    )
    yield from [f"{fence}text", *lines, fence, ""]
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
    order = ["region", "verdict", "timeline"]
    order += [column for column in rows[0] if column not in order]
    cells = ([row[column] for column in order] for row in rows)
    total = len(report.results)
    return [
        f"<details><summary>All regions: {total:,}</summary>\n",
        *table(order, cells, room, left=3),
        "</details>\n",
    ]


def _facts(report: Report) -> Iterator[str]:
    for name, fact in summary.facts(report):
        yield f"- {name}: {said(fact, _MOST_NAME)}"
    yield f"\n{html.escape(summary.LEGEND).replace('*', chr(92) + '*')}"
