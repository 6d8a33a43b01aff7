"""What a whole report comes to, in words that Markdown and the page share."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_cka_memory.core.verdicts import Report, Result
from pytest_cka_memory.limits import Breach
from pytest_cka_memory.reports.failure import explained
from pytest_cka_memory.reports.terminal import why_incomplete

VERDICTS = ("BREACH", "not judged", "no limit", "ok")
"""As :attr:`Result.verdict` has them, what needs a look first."""


class Problem(NamedTuple):
    """A limit that was broken, or could not be judged."""

    verdict: str
    result: Result
    limit: str
    """Empty where it is no limit's doing."""
    sentence: str
    explains: Breach | None = None
    """Whose holders to tell; None where there are none, or they are told already."""

    @property
    def holders(self) -> tuple[str, ...]:
        """Who holds the bytes, as lines; put into words only when asked, for few are shown."""
        return () if self.explains is None else tuple(explained(self.explains, self.result.record))


def counts(results: Sequence[Result]) -> dict[str, int]:
    """How many regions have each verdict, every verdict named."""
    found = Counter(result.verdict for result in results)
    return {verdict: found[verdict] for verdict in VERDICTS}


def is_predicted(session: Mapping[str, Any]) -> bool:
    """Whether the figures were computed for a device, not measured on one."""
    return "predicted" in str(session.get("meter")).lower()


def verdict(report: Report) -> str:
    """One line that a reviewer can stop reading after."""
    total, found = len(report.results), counts(report.results)
    regions = counted(total, "region")
    parts = []
    if not total:
        parts.append("nothing was measured")
    elif found["BREACH"]:
        parts.append(f"{found['BREACH']:,} of {regions} broke a limit")
    elif found["no limit"] == total:
        parts.append(f"{regions} measured, no limit to keep")
    elif found["ok"]:
        kept = "" if found["ok"] == total else f"{found['ok']:,} of "
        parts.append(f"{kept}{regions} kept every limit")
    parts += [f"{found['not judged']:,} not judged"] if found["not judged"] else []
    parts += [f"{counted(len(report.missing), 'test')} without a result"] if report.missing else []
    parts += [f"{sum(report.unmeasured.values())} not measured"] if report.unmeasured else []
    return ", ".join(parts)


def counted(count: int, noun: str) -> str:
    """Write ``1 region``, ``12,000 regions``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def problems(results: Sequence[Result]) -> Iterator[Problem]:
    """Broken limits of every region first, then what was not judged and why."""
    for result in results:
        told = set()
        for breach in result.breaches:
            known = breach.measured_bytes is None or breach.figure in told
            told.add(breach.figure)
            explains = None if known else breach
            yield Problem("BREACH", result, breach.limit, breach.message, explains)
    for result in results:
        for unjudged in result.unjudged:
            yield Problem("not judged", result, unjudged.limit, unjudged.reason)
        if not result.record.completed:
            yield Problem("not judged", result, "", why_incomplete(result))


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """What the figures depend on and what they leave out, name and text; of lists the first few."""
    session = report.session
    named = session.get("device_name")
    yield "device", f"{session.get('device')}{f' ({named})' if named else ''}"
    yield "meter", f"{session.get('meter')}"
    yield from (("note", str(note)) for note in list(session.get("notes") or ())[:_MOST_LISTED])
    versions = {"torch": "torch", "CUDA": "cuda", "Python": "python", "plugin": "plugin"}
    known = [f"{name} {session[key]}" for name, key in versions.items() if session.get(key)]
    yield "versions", ", ".join(known)
    yield "started", str(session.get("started"))
    for reason, count in list(report.unmeasured.items())[:_MOST_LISTED]:
        yield "not measured", f"{counted(count, 'test')}: {reason}"
    for nodeid in report.missing[:_MOST_LISTED]:
        yield "no result", nodeid
    if len(report.missing) > _MOST_LISTED:
        yield "no result", f"and {len(report.missing) - _MOST_LISTED:,} more"


PREDICTED = "These figures are predicted for the device, not measured on it."
LEGEND = (
    "Sizes are MB (1,048,576 bytes) where no unit is given. Start: live at entry; peak: highest "
    "live; increase: peak less start; retained: born inside and alive at the end; growth/b: rise "
    "of the upper level per batch, from 5 full batches on."
)
_MOST_LISTED = 10
