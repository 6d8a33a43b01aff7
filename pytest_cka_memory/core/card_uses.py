"""What tests need on different cards: peak, reserve, and whether the memory suffices."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_cka_memory.core.verdicts import Result

FITS, OUT_OF_MEMORY, FAILED, SKIPPED = "fits", "out of memory", "failed", "skipped"

_REFUSED = re.compile(
    r"Tried to allocate ([\d.]+) (\w+)\b.*?of which ([\d.]+) (\w+) is free", re.DOTALL
)
"""The sizes in torch's message, rounded to two digits after the point."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class CardUse:
    """One test on one card, with sizes in bytes."""

    test: str
    """The test's node ID."""
    card: str
    usable_bytes: int
    """Memory of the card without the CUDA context."""
    peak_bytes: int
    """Highest live level of the test's regions; up to the error if the test failed."""
    reserved_bytes: int
    """The most that the allocator held in them."""
    result: str
    """``fits``, ``out of memory``, ``failed`` (for another reason) or ``skipped``."""
    missing_bytes: int | None = None
    """How much memory was missing at least; None if the test fits or that is not known."""
    message: str = ""
    """The first line of the error of a failed test."""
    largest: tuple[int, ...] = ()
    """The largest sizes that the test has found by ``cka_memory.largest``."""

    @property
    def headroom_bytes(self) -> int:
        """Memory of the card that the allocator never took."""
        return self.usable_bytes - self.reserved_bytes


def uses_of(
    card: str,
    usable_bytes: int,
    results: Sequence[Result],
    ended: Mapping[str, tuple[str, str]],
    largest: Mapping[str, Sequence[int]],
) -> list[CardUse]:
    """Return the use of each test of a session, in the order of its report.

    Args:
        card: the card's name.
        usable_bytes: its memory without the CUDA context.
        results: the regions of the session; a test may have several.
        ended: test -> its outcome and its message, of tests that failed or were skipped.
        largest: test -> the largest sizes that it has found.
    """
    regions: dict[str, list[Result]] = {}
    for region in results:
        regions.setdefault(region.nodeid, []).append(region)
    for test in ended:  # also those that ended before they were measured
        regions.setdefault(test, [])
    uses = []
    for test, own in regions.items():
        outcome, message = ended.get(test, ("passed", ""))
        records = [region.record for region in own]
        result = SKIPPED if outcome == "skipped" else FITS if outcome == "passed" else FAILED
        if result == FAILED and is_out_of_memory(message):
            result = OUT_OF_MEMORY
        uses.append(
            CardUse(
                test,
                card,
                usable_bytes,
                peak_bytes=max((record.peak_bytes for record in records), default=0),
                reserved_bytes=max((r.reserved_peak_bytes or 0 for r in records), default=0),
                result=result,
                missing_bytes=missing_in(message) if result == OUT_OF_MEMORY else None,
                message=(message.strip().splitlines() or [""])[0],
                largest=tuple(largest.get(test, ())),
            )
        )
    return uses


def is_out_of_memory(message: str) -> bool:
    """Return whether a failure's message is that of torch for a device without memory."""
    return "OutOfMemoryError" in message or "CUDA out of memory" in message


def missing_in(message: str) -> int | None:
    """Return by how many bytes the refused allocation was too large; None if it does not say."""
    found = _REFUSED.search(message)
    if found is None or not {found[2], found[4]} <= _UNITS.keys():
        return None
    wanted, free = float(found[1]) * _UNITS[found[2]], float(found[3]) * _UNITS[found[4]]
    return max(0, round(wanted - free))


def with_peaks_elsewhere(uses: Sequence[CardUse]) -> list[CardUse]:
    """Return `uses` with what is missing at least according to cards on which the test fits.

    The refused allocation may be the first of several. The peak on a card on which the test ran to
    its end says more.
    """
    peaks: dict[str, int] = {}
    for use in uses:
        if use.result == FITS:
            peaks[use.test] = max(use.peak_bytes, peaks.get(use.test, 0))
    return [
        replace(
            use,
            missing_bytes=max(use.missing_bytes or 0, peaks[use.test] - use.usable_bytes) or None,
        )
        if use.result == OUT_OF_MEMORY and use.test in peaks
        else use
        for use in uses
    ]
