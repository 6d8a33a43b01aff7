"""The table of tests and cards as Markdown and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from pytest_cka_memory.core.card_uses import FITS, OUT_OF_MEMORY, CardUse
from pytest_cka_memory.reports import markdown
from pytest_cka_memory.reports.escapes import code, sentence
from pytest_cka_memory.units import format_size, format_with_unit

_HEAD = ("test", "card", "result", "peak", "reserved", "head room")
_LARGEST = "largest"
LEGEND = (
    "Sizes are in MB (2**20 bytes) unless a unit is given, from torch's CUDA allocator on emulated "
    "cards; no GPU was used. peak: highest live level; reserved: most that the allocator held; "
    "head room: memory of the card, without the CUDA context, that the allocator never took."
)
_LEGEND_OF_LARGEST = " largest: what cka_memory.largest has found."


def as_markdown(uses: Sequence[CardUse]) -> str:
    """Return a table with one row for each test and card, then the errors of failed tests."""
    ordered = by_test(uses)
    titles = head(uses)
    rows = [(code(use.test), use.card, _result(use), *figures(use, titles)) for use in ordered]
    lines = [f"### Memory on emulated cards: {verdict(uses)}", ""]
    lines += markdown.table(titles, rows, markdown.COMMENT_CHARACTERS // 2, left=3) if rows else []
    failed = [use for use in ordered if use.result not in (FITS, OUT_OF_MEMORY)]
    lines += [f"- {use.card}, {code(use.test)}: {sentence(use.message)}" for use in failed]
    return "\n".join([*lines, *([""] if failed else []), legend(uses), ""])


def as_json(uses: Sequence[CardUse]) -> str:
    """Return a list with one object for each test and card, with sizes in bytes."""
    rows = [{"emulated": True, **asdict(use), "headroom_bytes": use.headroom_bytes} for use in uses]
    return json.dumps(rows, indent=1) + "\n"


def head(uses: Sequence[CardUse]) -> tuple[str, ...]:
    """Return the titles of the columns; the last one only if a test has searched a largest size."""
    return (*_HEAD, _LARGEST) if any(use.largest for use in uses) else _HEAD


def legend(uses: Sequence[CardUse]) -> str:
    """Return what the columns mean."""
    return LEGEND + (_LEGEND_OF_LARGEST if _LARGEST in head(uses) else "")


def by_test(uses: Sequence[CardUse]) -> list[CardUse]:
    """Return `uses` with those of one test together; tests and cards keep their order."""
    order = {test: place for place, test in enumerate(dict.fromkeys(use.test for use in uses))}
    return sorted(uses, key=lambda use: order[use.test])


def verdict(uses: Sequence[CardUse]) -> str:
    """Return for each card how many tests fit: ``t4: 2 of 3 fit, a10: all 3 fit``."""
    parts = []
    for card in dict.fromkeys(use.card for use in uses):
        own = [use for use in uses if use.card == card]
        fitting = sum(use.result == FITS for use in own)
        share = f"all {len(own)}" if fitting == len(own) else f"{fitting} of {len(own)}"
        parts.append(f"{card}: {share} fit")
    return ", ".join(parts) or "no test ran"


def missing(use: CardUse) -> str:
    """Return how much memory is missing at least, as text; empty if that is not known."""
    if use.missing_bytes is None:
        return ""
    return f"at least {format_with_unit(use.missing_bytes)} missing"


def _result(use: CardUse) -> str:
    if use.result != OUT_OF_MEMORY:
        return use.result
    return ": ".join(filter(None, ("**does not fit**", missing(use))))


def figures(use: CardUse, titles: Sequence[str]) -> tuple[str, ...]:
    """Return the figures of the columns after the result as text; dashes if the test did not fit.

    Args:
        use: a test on a card.
        titles: those that :func:`head` returned for the whole table.
    """
    largest = (", ".join(map(str, use.largest)) or "-",) if _LARGEST in titles else ()
    if use.result != FITS:  # the figures of a test that did not run to its end mislead
        return ("-", "-", "-", *largest)
    return (
        format_size(use.peak_bytes),
        format_size(use.reserved_bytes),
        format_size(use.headroom_bytes),
        *largest,
    )
