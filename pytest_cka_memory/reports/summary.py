"""Counts, problems and facts of a whole report, for Markdown and the HTML page alike."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import KNOWN, WARNED, Breach, Result
from pytest_cka_memory.reports.failure import explanation, is_explained
from pytest_cka_memory.reports.rows import VERDICTS
from pytest_cka_memory.reports.terminal import garbage_at_peaks, highest, why_incomplete
from pytest_cka_memory.units import counted

_MOST_LISTED = 10
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
    found = Counter(result.verdict for result in results)
    return {verdict: found[verdict] for verdict in VERDICTS}


def verdict(report: Report) -> str:
    """Return the outcome of a session in one line."""
    total, found = len(report.results), counts(report.results)
    regions = counted(total, "region")
    parts = []
    if not total:
        parts.append("nothing was measured")
    elif found["BREACH"]:
        parts.append(f"{found['BREACH']:,} of {regions} broke a limit")
    elif found["no limit"] == total:
        parts.append(f"{regions} measured, no limits set")
    elif found["ok"]:
        kept = "" if found["ok"] == total else f"{found['ok']:,} of "
        parts.append(f"{kept}{regions} kept every limit")
    elif not found["not judged"] and not found[WARNED]:
        parts.append(f"{regions} measured")
    parts += [f"{counted(found[WARNED], 'warning')}"] if found[WARNED] else []
    parts += [f"{found[KNOWN]:,} {KNOWN}"] if found[KNOWN] else []
    parts += [f"{found['not judged']:,} not judged"] if found["not judged"] else []
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


def first_of_each(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[_T]:
    """Return `items` with the first one of each key before any second one, and so on.

    A list that is cut then leaves out no test while it has two entries of another.
    """
    turns: Counter[Hashable] = Counter()
    found = []
    for item in items:
        found.append((turns[key(item)], item))
        turns[key(item)] += 1
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def cut(items: Sequence[_T], most: int, key: Callable[[_T], Hashable]) -> Sequence[_T]:
    """Return `items`, or `most` of them as :func:`first_of_each` orders them if there are more."""
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
    yield from (("highest level", text.partition(": ")[2]) for text in highest(report.results))
    yield from (("garbage", text.partition(": ")[2]) for text in garbage_at_peaks(report.results))
    yield "started", str(session.get("started"))
    for reason, count in list(report.unmeasured.items())[:_MOST_LISTED]:
        yield "not measured", f"{counted(count, 'test')}: {reason}"
    for nodeid in report.missing[:_MOST_LISTED]:
        yield "no result", nodeid
    if len(report.missing) > _MOST_LISTED:
        yield "no result", f"and {len(report.missing) - _MOST_LISTED:,} more"
