"""The first cause of a broken limit in one line, and regions that share limits and cause."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.core.verdicts import KNOWN, Breach, Result
from pytest_cka_memory.reports.failure import holdings_of, is_traced
from pytest_cka_memory.reports.rows import VERDICTS
from pytest_cka_memory.reports.summary import Problem, problems
from pytest_cka_memory.units import format_with_unit

_KEYS = re.compile(r"\[[^]]*\]|\d+")


class Cause(NamedTuple):
    """The largest group of storages whose bytes a broken limit counts."""

    holding: Holding
    traced: bool
    """Whether references to it were searched for."""

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Words and the code that follows them: ``held by`` and ``net.CACHE``."""
        held, made = self.holding.held_by, self.holding.created_at
        found = [("held by", held)] if held else []
        if self.traced and not held:
            found = [("no Python reference was found", "")]
        if made:
            found.append(("made at", made[0]))
        if self.holding.module:
            found.append(("in", self.holding.module))
        if self.holding.code:
            found.append(("by", self.holding.code))
        return found

    @property
    def line(self) -> str:
        """All of it as one line of plain text."""
        size = format_with_unit(self.holding.bytes)
        return ", ".join([size, *(f"{words} {code}".strip() for words, code in self.parts)])

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for storages that were made in one line and are held in one way."""
        held = _KEYS.sub("", self.holding.held_by or "")
        return (held, self.holding.created_at[:1], self.holding.code)


class ProblemGroup(NamedTuple):
    """Regions with the same broken limits, or the same reason not to be judged, and one cause."""

    problems: tuple[Problem, ...]
    """Of the region that is furthest above the limit."""
    results: tuple[Result, ...]
    """All of them, in their order."""
    cause: Cause | None

    @property
    def result(self) -> Result:
        """The region that is furthest above the limit."""
        return self.problems[0].result

    @property
    def breaches(self) -> tuple[Breach, ...]:
        """The limits that it broke, with this verdict."""
        verdict, result = self.problems[0].verdict, self.result
        return tuple(each for each in result.breaches if result.verdict_of(each) == verdict)


def cause_of(breach: Breach, record: RegionRecord) -> Cause | None:
    """Return the largest group that was allocated in the region; None if none is known."""
    inside = [holding for holding in holdings_of(breach, record) if not holding.before_region]
    return Cause(inside[0], is_traced(breach)) if inside else None


def first_cause(result: Result) -> Cause | None:
    """Return the cause of the first broken limit that has one."""
    found = (cause_of(breach, result.record) for breach in result.breaches)
    return next((cause for cause in found if cause is not None), None)


def problem_groups(results: Sequence[Result]) -> list[ProblemGroup]:
    """Return what is to be looked at, broken limits first; equal regions are one entry."""
    groups: dict[tuple[object, ...], list[tuple[Problem, ...]]] = {}
    for verdict in VERDICTS[: VERDICTS.index(KNOWN) + 1]:
        for result in results:
            found = tuple(p for p in problems([result]) if p.verdict == verdict)
            if found:
                groups.setdefault(_key(found), []).append(found)
    return sorted(map(_group, groups.values()), key=_place)


def _place(group: ProblemGroup) -> tuple[int, int]:
    """Return what sorts groups by how urgent they are, then by the peak of their worst region."""
    return VERDICTS.index(group.problems[0].verdict), -group.result.record.peak_bytes


def _key(found: Sequence[Problem]) -> tuple[object, ...]:
    limits = tuple(problem.limit for problem in found)
    cause = None if found[0].verdict == "not judged" else first_cause(found[0].result)
    if cause is None:
        return (found[0].verdict, limits, *(problem.sentence for problem in found))
    return (found[0].verdict, limits, *cause.key)


def _group(members: Sequence[tuple[Problem, ...]]) -> ProblemGroup:
    worst = max(members, key=lambda found: max(_excesses(found[0].result), default=0.0))
    results = tuple(found[0].result for found in members)
    judged = worst[0].verdict != "not judged"
    return ProblemGroup(worst, results, first_cause(worst[0].result) if judged else None)


def _excesses(result: Result) -> Iterator[float]:
    for breach in result.breaches:
        if breach.measured_bytes is not None:
            yield breach.measured_bytes - breach.allowed_bytes
