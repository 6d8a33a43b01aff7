"""What tests need on different cards, and the table of it as Markdown, JSON and an HTML page."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports import code, html, markdown, sentence
from pytest_cka_memory.units import format_size, format_with_unit

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
    condition: str = ""
    """Under which condition it fits; empty if what the reserve leaves of the card suffices."""

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


_HEAD = ("test", "card", "result", "peak", "reserved", "headroom")
_WORDS = 3
"""Columns of text; figures follow."""
_LARGEST = "largest"
LEGEND = (
    "Sizes are in MB (2**20 bytes) unless a unit is given. They come from torch's CUDA allocator "
    "on emulated cards; no GPU was used. peak: most memory in use at once; reserved: most memory "
    "that the allocator reserved; headroom: memory of the card, without the CUDA context, that the "
    "allocator never reserved."
)
_LEGEND_OF_BAR = (
    "The bar shows the memory of the card, from left to right: in use at the peak, reserved but "
    "not in use, never reserved."
)
_LEGEND_OF_LARGEST = " largest: the largest size that cka_memory.largest found to fit on the card."


def as_markdown(uses: Sequence[CardUse]) -> str:
    """Return a table with one row for each test and card, then the errors of failed tests."""
    ordered, titles = _by_test(uses), _titles(uses)
    rows = []
    for use in ordered:
        result = ", ".join(filter(None, (use.result, use.condition)))
        if use.result == OUT_OF_MEMORY:
            result = ": ".join(filter(None, ("**does not fit**", _missing(use))))
        rows.append((code(use.test), use.card, result, *_figures(use, titles)))
    room = markdown.COMMENT_CHARACTERS // 2
    errors = [
        f"- {use.card}, {code(use.test)}: {sentence(use.message)}" for use in _failed(ordered)
    ]
    lines = [
        *(f"### Memory on emulated cards: {verdict(uses)}", ""),
        *(markdown.table(titles, rows, room, left=_WORDS) if rows else []),
        *([*errors, ""] if errors else []),
        *(_legend(titles), ""),
    ]
    return "\n".join(lines)


def as_json(uses: Sequence[CardUse]) -> str:
    """Return a list with one object for each test and card, with sizes in bytes."""
    rows = [{"emulated": True, **asdict(use), "headroom_bytes": use.headroom_bytes} for use in uses]
    return json.dumps(rows, indent=1) + "\n"


def as_html(uses: Sequence[CardUse]) -> str:
    """Return the page as HTML, with one row for each test and card."""
    ordered, titles = _by_test(uses), _titles(uses)
    kinds = ("name", "word", "result", *("" for _ in titles[_WORDS:]))
    columns = {title.capitalize(): kind for title, kind in zip(titles, kinds, strict=True)}
    rows = (
        (
            f"<code>{html.text(use.test)}</code>",
            html.text(use.card),
            f"{_html_result(use)}{_bar(use)}",
            *_figures(use, titles),
        )
        for use in ordered
    )
    legend = f"<p class='legend'>{html.text(_legend(titles))} {_LEGEND_OF_BAR}</p>"
    main = [html.table(columns, rows), *_html_errors(_failed(ordered)), legend]
    return html.plain_page("Memory on emulated cards", verdict(uses), "\n".join(main))


def _html_result(use: CardUse) -> str:
    if use.result == OUT_OF_MEMORY:
        return f"<span class='verdict breach'>does not fit</span> {_missing(use)}"
    style = {FITS: "ok", SKIPPED: "no-limit"}.get(use.result, "breach")
    condition = f" {html.text(use.condition)}" if use.condition else ""
    return f"<span class='verdict {style}'>{use.result}</span>{condition}"


def _bar(use: CardUse) -> str:
    """Return the shares of the card's memory that were live and in reserve; empty if unknown."""
    if use.result != FITS:
        return ""
    live = 100 * use.peak_bytes / use.usable_bytes
    reserve = 100 * max(0, use.reserved_bytes - use.peak_bytes) / use.usable_bytes
    return (
        f"<span class='bar' aria-hidden='true'><i style='width:{live:.2f}%'></i>"
        f"<i class='base' style='width:{reserve:.2f}%'></i></span>"
    )


def _html_errors(failed: Sequence[CardUse]) -> Iterator[str]:
    if not failed:
        return
    yield "<h2>Tests that failed or were skipped</h2><ul>"
    for use in failed:
        card, test, message = map(html.text, (use.card, use.test, use.message))
        yield f"<li>{card}, <code>{test}</code>: {message}</li>"
    yield "</ul>"


def verdict(uses: Sequence[CardUse]) -> str:
    """Return for each card how many tests fit: ``t4: 2 of 3 fit, a10: all 3 fit``."""
    parts = []
    for card in dict.fromkeys(use.card for use in uses):
        own = [use for use in uses if use.card == card]
        fitting = sum(use.result == FITS for use in own)
        share = f"all {len(own)}" if fitting == len(own) else f"{fitting} of {len(own)}"
        parts.append(f"{card}: {share} fit")
    return ", ".join(parts) or "no test ran"


def _titles(uses: Sequence[CardUse]) -> tuple[str, ...]:
    """Return the titles of the columns; the last one only if a test has searched a largest size."""
    return (*_HEAD, _LARGEST) if any(use.largest for use in uses) else _HEAD


def _legend(titles: Sequence[str]) -> str:
    return LEGEND + (_LEGEND_OF_LARGEST if _LARGEST in titles else "")


def _by_test(uses: Sequence[CardUse]) -> list[CardUse]:
    """Return `uses` with those of one test together; tests and cards keep their order."""
    order = {test: place for place, test in enumerate(dict.fromkeys(use.test for use in uses))}
    return sorted(uses, key=lambda use: order[use.test])


def _failed(uses: Sequence[CardUse]) -> list[CardUse]:
    return [use for use in uses if use.result not in (FITS, OUT_OF_MEMORY)]


def _missing(use: CardUse) -> str:
    """Return how much memory is missing at least, as text; empty if that is not known."""
    if use.missing_bytes is None:
        return ""
    return f"at least {format_with_unit(use.missing_bytes)} missing"


def _figures(use: CardUse, titles: Sequence[str]) -> tuple[str, ...]:
    """Return the cells after the result, one for each of `titles` that is left."""
    largest = (", ".join(map(str, use.largest)) or "-",) if _LARGEST in titles else ()
    if use.result != FITS:  # the figures of a test that did not run to its end mislead
        return ("-", "-", "-", *largest)
    sizes = (use.peak_bytes, use.reserved_bytes, use.headroom_bytes)
    return (*map(format_size, sizes), *largest)
