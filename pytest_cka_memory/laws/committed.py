"""A law as builtin types, as baselines keep it, and the comparison of two."""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from pytest_cka_memory.laws.law import Law
from pytest_cka_memory.laws.polynomials import Polynomial, number_text, polynomial, term_text

_MOST_LINES = 6
_LINE_NUMBER = re.compile(r":\d+( in |$|:)")


def to_dict(law: Law) -> dict[str, Any]:
    """Return the pieces that are the highest somewhere, with the lines of each term."""
    terms = iter(law.terms)
    pieces = []
    for piece in law.fitted.highest_pieces():
        own = [next(terms) for _ in piece.polynomial.terms]
        pieces.append(
            {
                "at": str(piece.moment),
                "terms": [
                    {
                        "powers": [term.powers.get(name, 0) for name in law.names],
                        "bytes": str(term.coefficient),
                        "lines": {line: str(share) for line, share in term.lines[:_MOST_LINES]},
                    }
                    for term in own
                ],
            }
        )
    return {
        "of": law.figure,
        "sizes": list(law.names),
        "least": list(law.fitted.least),
        "exact": law.is_exact,
        **({"on": law.elsewhere} if law.elsewhere else {}),
        "pieces": pieces,
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return how a law is above a committed one, both side by side; empty if it is not.

    A law is above another if it has a piece that, from the least sizes on, is not always below one
    of the other's pieces. Laws that are not exact are compared by their degrees alone.

    Args:
        old: the committed law, as :func:`to_dict` has returned it.
        new: the law now.
    """
    if (old["of"], old["sizes"]) != (new["of"], new["sizes"]):
        return (
            f"the committed law is of {old['of']} over {', '.join(old['sizes'])}, and the test "
            f"has one of {new['of']} over {', '.join(new['sizes'])}: update the baseline"
        )
    if old.get("on") != new.get("on"):
        devices = [law.get("on", "the device of the session") for law in (old, new)]
        return (
            f"the committed law was measured on {devices[0]}, and this one on {devices[1]}: update "
            "the baseline"
        )
    least = [max(pair) for pair in zip(old["least"], new["least"], strict=True)]
    before, now = _pieces(old), _pieces(new)
    is_exact = old["exact"] and new["exact"]
    for number, piece in enumerate(now):
        same = _nearest(piece, before)
        if same is None:
            continue
        if is_exact and any(_is_above(other, piece, least) for other in before):
            continue
        if not is_exact and all(
            piece.degree(name) <= max(other.degree(name) for other in before)
            for name in piece.names
        ):
            continue
        terms = _changed_terms(old["pieces"][same], new["pieces"][number], new["sizes"])
        return (
            f"the law of the {new['of']} has changed. It was {before[same]}, it is {piece}. "
            f"What rose: {'; '.join(terms)}"
        )
    return ""


def _pieces(law: Mapping[str, Any]) -> list[Polynomial]:
    return [
        polynomial(
            law["sizes"],
            {tuple(term["powers"]): Fraction(term["bytes"]) for term in piece["terms"]},
        )
        for piece in law["pieces"]
    ]


def _is_above(upper: Polynomial, lower: Polynomial, least: list[int]) -> bool:
    return all(factor >= 0 for _, factor in (upper - lower).shifted(least).terms)


def _nearest(piece: Polynomial, others: list[Polynomial]) -> int | None:
    """Return the index of the polynomial that differs from `piece` in the fewest terms."""
    if not others:
        return None
    return min(
        range(len(others)),
        key=lambda index: (
            len((piece - others[index]).terms),
            sum(abs(factor) for _, factor in (piece - others[index]).terms),
        ),
    )


def _changed_terms(
    old: Mapping[str, Any], new: Mapping[str, Any], names: list[str]
) -> Iterator[str]:
    """Yield each term whose coefficient rose, with the lines that changed, highest powers first."""
    before = {tuple(term["powers"]): term for term in old["terms"]}
    for term in new["terms"]:
        known = before.get(tuple(term["powers"]), {"bytes": "0", "lines": {}})
        rise = Fraction(term["bytes"]) - Fraction(known["bytes"])
        if rise > 0:
            text = term_text(names, tuple(term["powers"]), None)
            lines = ", ".join(_changed_lines(known["lines"], term["lines"]))
            made = f" ({lines})" if lines else ""
            yield f"{text}: {number_text(Fraction(known['bytes']))} -> " + (
                f"{number_text(Fraction(term['bytes']))} bytes{made}"
            )


def _changed_lines(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Yield lines with a larger share, also if the numbers of lines have changed."""
    before: dict[str, Fraction] = {}
    for line, share in old.items():
        name = _without_number(line)
        before[name] = before.get(name, Fraction(0)) + Fraction(share)
    now: dict[str, Fraction] = {}
    places: dict[str, str] = {}
    for line, share in new.items():
        name = _without_number(line)
        now[name] = now.get(name, Fraction(0)) + Fraction(share)
        places.setdefault(name, line)
    rises = {name: share - before.get(name, Fraction(0)) for name, share in now.items()}
    for name, rise in sorted(rises.items(), key=lambda pair: -pair[1])[:2]:
        if rise > 0:
            yield f"{places[name]}: +{number_text(rise)}"


def _without_number(line: str) -> str:
    return _LINE_NUMBER.sub(r"\1", line, count=1)
