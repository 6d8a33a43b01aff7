"""A law as lines of text, which fit a screen."""

from collections.abc import Iterator, Sequence

from pytest_cka_memory.laws.fitting import Fitted
from pytest_cka_memory.laws.polynomials import number_text
from pytest_cka_memory.laws.samples import WHOLE
from pytest_cka_memory.laws.terms import Term
from pytest_cka_memory.units import counted

_MOST_LINES = 4
"""Lines of code that are shown of a term."""
_ORDINALS = ("first", "second", "third")
_MOST_PIECES = len(_ORDINALS)


def lines_of(
    figure: str, device: str, runs: int, fitted: Fitted, terms: Sequence[Term]
) -> Iterator[str]:
    """Yield the text of a law: its pieces, the terms of the first by line, and what is not sure."""
    pieces = fitted.highest_pieces()
    samples = counted(len(fitted.samples), "sample")
    given = "the law gives each of them" if fitted.is_exact else "no polynomial gives all of them"
    if fitted.is_exact and fitted.switches:
        given = f"the law gives each from {_sizes(fitted, fitted.least)} on"
    yield f"{figure} on {device}, in bytes: {counted(runs, 'run')}, {samples}, {given}"
    sign = "=" if fitted.is_exact else "≈"
    for number, piece in enumerate(pieces[:_MOST_PIECES]):
        yield f"{'or, if higher,' if number else figure} {sign} {piece.polynomial}"
    if len(pieces) > _MOST_PIECES:
        yield f"or, if higher, {counted(len(pieces) - _MOST_PIECES, 'other piece')}"
    if pieces[0].moment.site is not WHOLE:
        yield f"{'the first is at' if len(pieces) > 1 else 'at'} {pieces[0].moment}"
    start = 0
    for number, piece in enumerate(pieces[:_MOST_PIECES]):
        count = len(piece.polynomial.terms)
        if number and count:
            yield f"the highest term of the {_ORDINALS[number]}, at {piece.moment}"
        for term in terms[start : start + (1 if number else count)]:
            yield from _term(term)
        start += count
    for switch in fitted.switches:
        yield f"note: {switch}"
    for line in fitted.unfollowed[:_MOST_LINES] if fitted.is_exact else ():
        yield f"note: came close to the peak and has no law: {line}"
    for point, residual in list(fitted.residuals.items())[:_MOST_LINES]:
        yield f"note: measured at {_sizes(fitted, point)}: {residual:+,} bytes beside the law"


def _sizes(fitted: Fitted, point: Sequence[int]) -> str:
    return ", ".join(f"{name}={size:,}" for name, size in zip(fitted.names, point, strict=True))


def _term(term: Term) -> Iterator[str]:
    if not term.lines:
        return
    yield f"  {term}"
    for line, share in term.lines[:_MOST_LINES]:
        yield f"    {number_text(share):>16}  {line}"
    rest = term.lines[_MOST_LINES:]
    if rest:
        total = sum(share for _, share in rest)
        yield f"    {number_text(total):>16}  {counted(len(rest), 'other line')}"
