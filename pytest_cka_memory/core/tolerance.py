"""How far a figure may rise above an older one: the same rule for baselines and report files."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from pytest_cka_memory.core.conditions import Changed
from pytest_cka_memory.core.figures import COMPARED
from pytest_cka_memory.errors import LimitError, SizeError
from pytest_cka_memory.units import format_exact, parse_size

_PERCENT = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*")


@dataclass(frozen=True)
class Tolerance:
    """A share of the old figure, a number of bytes, or the sum of both."""

    text: str
    """As the user wrote it: ``5% + 64 KiB``."""
    share: Fraction = Fraction(0)
    """``5%`` is 1/20. A fraction, because a float would be a byte off at a boundary."""
    slack_bytes: int = 0

    def allowed_bytes(self, old: float) -> int:
        """Return the most whole bytes allowed for a figure that was `old`; 0 if `old` is negative.

        The absolute part comes on top in both cases.
        """
        level = max(Fraction(old), Fraction(0))
        return int(level * (1 + self.share)) + self.slack_bytes


def parse_tolerance(value: object) -> Tolerance:
    """Read ``'5%'``, ``'64 KiB'`` or ``'5% + 64 KiB'``.

    Raises:
        LimitError: for anything else; a number alone could mean percent, bytes or MB.
    """
    parts = value.split("+") if isinstance(value, str) else []
    percents = [percent for part in parts if (percent := _PERCENT.fullmatch(part))]
    sizes = [part for part in parts if not _PERCENT.fullmatch(part)]
    try:
        if len(percents) > 1 or len(sizes) > 1 or not parts:
            raise SizeError
        slack_bytes = sum(map(parse_size, sizes))
    except SizeError:
        raise LimitError(
            f"cannot read {value!r} as a tolerance; write '5%', '64 KiB' or '5% + 64 KiB'"
        ) from None
    share = sum((Fraction(percent[1]) / 100 for percent in percents), Fraction(0))
    return Tolerance(" ".join(str(value).split()), share, slack_bytes)


@dataclass(frozen=True)
class Difference:
    """A figure that has changed."""

    figure: str
    """Its name in a record."""
    old_bytes: float
    new_bytes: float | None
    """None if it was not determined this time, so that a rise cannot be ruled out."""
    allowed_bytes: int

    @property
    def broken(self) -> bool:
        """Whether it rose by more than the tolerance, or is not known."""
        # Not with >, which is False for a NaN.
        return self.new_bytes is None or not self.new_bytes <= self.allowed_bytes


def excess(difference: Difference, tolerance: Tolerance, whose: str) -> str:
    """Return by how much a known figure is above that of the baseline or of another test."""
    new, allowed = difference.new_bytes or 0, difference.allowed_bytes
    return (
        f"{COMPARED[difference.figure].noun} {format_exact(new)}, allowed {format_exact(allowed)} "
        f"({tolerance.text} above {whose}'s {format_exact(difference.old_bytes)}): "
        f"{format_exact(new - allowed)} too much"
    )


def differences(
    old: Mapping[str, float | None],
    new: Mapping[str, float | None],
    tolerance: Tolerance,
    changed: Sequence[Changed] = (),
) -> list[Difference]:
    """Return every compared figure of `old` that has another value in `new`, higher or lower.

    Those that depend on one of the facts that have `changed` are left out. A figure that is
    compared in place of another is left out unless that one is.
    """
    undecided = depending_on(changed)
    return [
        Difference(figure, level, new.get(figure), tolerance.allowed_bytes(level))
        for figure, row in COMPARED.items()
        if figure not in undecided and (not row.in_place_of or row.in_place_of in undecided)
        if (level := old.get(figure)) is not None and new.get(figure) != level
    ]


def depending_on(changed: Sequence[Changed]) -> dict[str, list[Changed]]:
    """Return the compared figures that depend on some of these facts, with those facts."""
    found = {
        figure: [fact for fact in changed if fact.fact in row.depends_on]
        for figure, row in COMPARED.items()
    }
    return {figure: facts for figure, facts in found.items() if facts}


def not_comparable(
    old: Mapping[str, float | None], changed: Sequence[Changed]
) -> list[tuple[str, list[Changed], str]]:
    """Return figures of `old` that are not compared, with the facts, and what is in their place.

    That is the name of another figure, or empty.
    """
    undecided = depending_on(changed)
    places = {
        row.in_place_of: name
        for name, row in COMPARED.items()
        if name not in undecided and old.get(name) is not None
    }
    return [
        (figure, facts, places.get(figure, ""))
        for figure, facts in undecided.items()
        if old.get(figure) is not None and not COMPARED[figure].in_place_of
    ]
