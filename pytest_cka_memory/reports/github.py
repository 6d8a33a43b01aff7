"""Workflow commands of GitHub Actions that annotate the lines of a pull request.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import WARNED, Result
from pytest_cka_memory.reports import command_message, command_property, one_line, shorten, summary
from pytest_cka_memory.reports.summary import Problem
from pytest_cka_memory.reports.tables import provenance_of
from pytest_cka_memory.units import counted

MOST_PER_KIND = 10
"""GitHub shows only the first ten of each kind per step."""

_MOST_LINES = 12
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
        f"{key}={command_property(str(value))}"
        for key, value in properties.items()
        if value is not None
    ]
    return f"::{kind} {','.join(pairs)}::{command_message(message)}"


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
        holders = alone.holders
        if len(holders) > _MOST_LINES:  # the last line says how much they explain
            holders = (*holders[: _MOST_LINES - 1], holders[-1])
        lines = [f"{problem.result.name}: {problem.sentence}", *holders]
        message = "\n".join(shorten(one_line(line), _MOST_LINE) for line in lines)
        place = _place(problem.result, report, path_of)
        yield command(kind, message, **place, title=f"{one_line(problem.limit)} broken{source}")


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
