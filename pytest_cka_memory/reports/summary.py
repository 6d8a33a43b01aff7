"""Counts, problems with their causes, and facts of a whole report, for all its formats."""

import heapq
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from pytest_cka_memory.core import sentences
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.reserve import reserve_advice
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.verdicts import KNOWN, WARNED, Breach, Result
from pytest_cka_memory.reports.failure import (
    explanation,
    hint_within,
    holdings_of,
    is_explained,
    is_reserve_the_cause,
    is_traced,
)
from pytest_cka_memory.reports.tables import VERDICTS
from pytest_cka_memory.units import counted, format_with_unit

_MOST_LISTED = 10
_MOST_RESERVES = 3
"""So many regions with a rising reserve are named."""
_KEYS = re.compile(r"\[[^]]*\]|\d+")
"""What differs between names of equal regions: indices, keys and numbers."""
_T = TypeVar("_T")


class Problem(NamedTuple):
    """A limit that was broken, or that could not be judged."""

    verdict: str
    result: Result
    limit: str
    """Empty if the problem belongs to no limit."""
    sentence: str
    explains: Breach | None = None
    """Breach whose holders to show; None if there are none or they are shown already."""
    earlier: tuple[Breach, ...] = ()
    """The limits of the same region that are shown before it."""

    @property
    def holders(self) -> tuple[str, ...]:
        """What references the bytes, as lines; computed on use, because few are shown."""
        if self.explains is None:
            return ()
        return tuple(explanation(self.explains, self.result.record, earlier=self.earlier))


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Return the number of regions per verdict, with every verdict as a key."""
    counter = Counter(result.verdict for result in results)
    return {verdict: counter[verdict] for verdict in VERDICTS}


def verdict(report: Report) -> str:
    """Return the outcome of a session in one line."""
    total, number = len(report.results), counts(report.results)
    regions = counted(total, "region")
    parts = []
    if not total:
        parts.append("nothing was measured")
    elif number["BREACH"]:
        parts.append(f"{number['BREACH']:,} of {regions} broke a limit")
    elif number["no limit"] == total:
        parts.append(f"{regions} measured, no limits set")
    elif number["ok"]:
        kept = "" if number["ok"] == total else f"{number['ok']:,} of "
        parts.append(f"{kept}{regions} kept every limit")
    elif not number["not judged"] and not number[WARNED]:
        parts.append(f"{regions} measured")
    parts += [f"{counted(number[WARNED], 'warning')}"] if number[WARNED] else []
    parts += [f"{number[KNOWN]:,} {KNOWN}"] if number[KNOWN] else []
    parts += [f"{number['not judged']:,} not judged"] if number["not judged"] else []
    parts += [f"{counted(len(report.missing), 'test')} without a result"] if report.missing else []
    parts += [f"{sum(report.unmeasured.values())} not measured"] if report.unmeasured else []
    return ", ".join(parts)


def problems(results: Sequence[Result]) -> Iterator[Problem]:
    """Yield the broken limits of every region, known ones last, then what was not judged."""
    for result in sorted(results, key=lambda result: result.verdict == KNOWN):
        for number, breach in enumerate(result.breaches):
            earlier = result.breaches[:number]
            explains = breach if is_explained(breach, earlier) else None
            verdict = result.verdict_of(breach)
            yield Problem(verdict, result, breach.limit, breach.message, explains, earlier)
    for result in results:
        for unjudged in result.unjudged:
            yield Problem("not judged", result, unjudged.limit, unjudged.reason)
        if not result.record.completed:
            yield Problem("not judged", result, "", why_incomplete(result))


def not_judged(results: Sequence[Result]) -> Iterator[tuple[str, str, list[Result]]]:
    """Yield each limit that was not judged, with the reason and the regions.

    The regions of passed tests that an exception ended follow, each with an empty limit.
    """
    regions: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        for each in result.unjudged:
            regions.setdefault((each.limit, each.reason), []).append(result)
    yield from ((limit, reason, own) for (limit, reason), own in regions.items())
    for result in results:
        if result.limits and not result.record.completed and result.outcome == "passed":
            yield "", why_incomplete(result), [result]


def why_incomplete(result: Result) -> str:
    """Return why a region that an exception ended was not judged."""
    if result.outcome in ("passed", "xpassed"):
        return (
            "an exception left the region's 'with' block; put the block around the code that "
            "catches the exception"
        )
    return "the test was skipped" if result.outcome == "skipped" else "the test failed"


def first_of_each(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[_T]:
    """Return `items` with the first one of each key before any second one, and so on.

    A list that is cut then leaves out no test while it has two entries of another.

    Args:
        items: in the order in which those of one key stay.
        key: returns what must be represented, such as the test of a region.
    """
    turns: Counter[Hashable] = Counter()
    in_turns = []
    for item in items:
        in_turns.append((turns[key(item)], item))
        turns[key(item)] += 1
    return [item for _, item in sorted(in_turns, key=lambda pair: pair[0])]


def cut(items: Sequence[_T], most: int, key: Callable[[_T], Hashable]) -> Sequence[_T]:
    """Return `items`, or `most` of them as :func:`first_of_each` orders them if there are more.

    Example:
        >>> cut(["a1", "a2", "b1"], 2, key=lambda item: item[0])
        ['a1', 'b1']
    """
    return items if len(items) <= most else first_of_each(items, key)[:most]


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """Yield name and text of what the figures depend on and leave out; only the start of lists."""
    session = report.session
    named = session.get("device_name")
    yield "device", f"{session.get('device')}{f' ({named})' if named else ''}"
    yield "meter", f"{session.get('meter')}"
    yield from (("note", str(note)) for note in list(session.get("notes") or ())[:_MOST_LISTED])
    versions = {"torch": "torch", "CUDA": "cuda", "Python": "python", "plugin": "plugin"}
    known = [f"{name} {session[key]}" for name, key in versions.items() if session.get(key)]
    yield "versions", ", ".join(known)
    yield from extremes(report.results)
    yield "started", str(session.get("started"))
    for reason, count in list(report.unmeasured.items())[:_MOST_LISTED]:
        yield "not measured", f"{counted(count, 'test')}: {reason}"
    for nodeid in report.missing[:_MOST_LISTED]:
        yield "no result", nodeid
    if len(report.missing) > _MOST_LISTED:
        yield "no result", f"and {len(report.missing) - _MOST_LISTED:,} more"


def extremes(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Yield name and sentence of what one region of a session has most of.

    These are the level, garbage, and a reserve that rises although what is in use does not.
    """
    completed = [result for result in results if result.record.completed]
    if len(completed) > 1:
        most = max(completed, key=lambda result: result.record.peak_bytes)
        yield "highest level", f"{format_with_unit(most.record.peak_bytes)} in {most.name}"
    littered = [result for result in results if sentences.note_on_peak(result.record)]
    if littered:
        most = max(littered, key=lambda result: sentences.bytes_at_peak(result.record))
        others = counted(len(littered) - 1, "other region")
        also = f" (and in {others})" if len(littered) > 1 else ""
        yield "garbage", f"{sentences.note_on_peak(most.record)}, in {most.name}{also}"
    for result in _with_rising_reserve(results):
        yield "reserve", f"in {result.name}, {sentences.note_on_reserve(result.record)}"


def _with_rising_reserve(results: Sequence[Result]) -> list[Result]:
    """Return regions whose reserve rises, the highest first, without those that say so already."""

    def is_said(result: Result) -> bool:
        # It judges the reserve, or lists it as not judged.
        return any(limit.partition("(")[0] == "flat_per_batch" for limit in result.limits)

    rising = [
        result
        for result in results
        if not is_said(result) and sentences.note_on_reserve(result.record)
    ]
    return heapq.nlargest(
        _MOST_RESERVES, rising, key=lambda result: result.record.reserved_peak_bytes or 0
    )


class Cause(NamedTuple):
    """The largest group of storages whose bytes a broken limit counts."""

    holding: Holding
    traced: bool
    """Whether references to it were searched for."""

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Words and the code that follows them: ``held by`` and ``net.CACHE``."""
        held, made = self.holding.held_by, self.holding.created_at
        parts = [("held by", held)] if held else []
        if self.traced and not held:
            parts = [("no Python reference was found", "")]
        if made:
            parts.append(("made at", made[0]))
        if self.holding.module:
            parts.append(("in", self.holding.module))
        if self.holding.code:
            parts.append(("by", self.holding.code))
        if self.holding.keeps_bytes:
            kept = format_with_unit(self.holding.keeps_bytes)
            parts.append((f"prevents the release of {kept} of free memory beside it", ""))
        return parts

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
    """The problems of the region that is furthest above its limit."""
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


def first_cause(result: Result) -> Cause | None:
    """Return the largest group that the region allocated, of the first limit that has one."""
    for breach in result.breaches:
        if is_reserve_the_cause(breach, result.record):
            advice = reserve_advice(result.record.reserve)
            kept_by = result.record.reserve_kept_by[:1]
            return Cause(replace(kept_by[0], hint=advice), True) if kept_by else None
        for holding in holdings_of(breach, result.record):
            if not holding.before_region:
                advised = replace(holding, hint=hint_within(breach, holding))
                return Cause(advised, is_traced(breach))
    return None


def problem_groups(results: Sequence[Result]) -> list[ProblemGroup]:
    """Return what is to be looked at, broken limits first; equal regions are one entry."""
    groups: dict[tuple[object, ...], list[tuple[Problem, ...]]] = {}
    for result in results:
        by_verdict: dict[str, list[Problem]] = {}
        for problem in problems([result]):
            by_verdict.setdefault(problem.verdict, []).append(problem)
        for own in map(tuple, by_verdict.values()):
            groups.setdefault(_key(own), []).append(own)

    def place(group: ProblemGroup) -> tuple[int, int]:
        # Equally urgent groups are sorted by the peak of their worst region.
        return VERDICTS.index(group.problems[0].verdict), -group.result.record.peak_bytes

    return sorted(map(_group, groups.values()), key=place)


def _key(own: Sequence[Problem]) -> tuple[object, ...]:
    """Return what the problems of equal regions have in common."""
    limits = tuple(problem.limit for problem in own)
    cause = None if own[0].verdict == "not judged" else first_cause(own[0].result)
    if cause is None:
        return (own[0].verdict, limits, *(problem.sentence for problem in own))
    return (own[0].verdict, limits, *cause.key)


def _group(members: Sequence[tuple[Problem, ...]]) -> ProblemGroup:
    def excess(own: tuple[Problem, ...]) -> float:
        excesses = (
            breach.measured_bytes - breach.allowed_bytes
            for breach in own[0].result.breaches
            if breach.measured_bytes is not None
        )
        return max(excesses, default=0.0)

    worst = max(members, key=excess)
    results = tuple(own[0].result for own in members)
    judged = worst[0].verdict != "not judged"
    return ProblemGroup(worst, results, first_cause(worst[0].result) if judged else None)
