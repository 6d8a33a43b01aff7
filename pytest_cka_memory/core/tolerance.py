"""How far a figure may rise above an older one: one rule for baselines and for comparing files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from pytest_cka_memory.errors import LimitError, SizeError
from pytest_cka_memory.units import parse_size

COMPARED = {
    "peak_increase_bytes": "peak increase",
    "retained_bytes": "retained",
    "growth_bytes_per_batch": "growth per batch",
    "reserved_increase_bytes": "reserve increase",
}
"""The figures that are compared -> what messages call them."""

_PERCENT = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*")


@dataclass(frozen=True)
class Tolerance:
    """A share of the old figure, a number of bytes, or the sum of both."""

    text: str
    """As the user wrote it: ``5% + 64 KiB``."""
    share: Fraction = Fraction(0)
    """``5%`` is 1/20; a fraction, for at a boundary a float would be a byte off."""
    slack_bytes: int = 0

    def allowed_bytes(self, old: float) -> int:
        """The most, in whole bytes, that a figure may be which was `old`; one below 0 may be 0."""
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
    """A figure that is not what it was."""

    figure: str
    """Its name in a record, a key of :data:`COMPARED`."""
    old_bytes: float
    new_bytes: float | None
    """None where it was not determined this time: then nobody can say that it did not rise."""
    allowed_bytes: int

    @property
    def broken(self) -> bool:
        """Whether it rose by more than the tolerance, or cannot be told."""
        return self.new_bytes is None or not self.new_bytes <= self.allowed_bytes


def differences(
    old: Mapping[str, float | None], new: Mapping[str, float | None], tolerance: Tolerance
) -> list[Difference]:
    """Every compared figure of `old` that is another one in `new`, risen or fallen."""
    return [
        Difference(figure, level, new.get(figure), tolerance.allowed_bytes(level))
        for figure in COMPARED
        if (level := old.get(figure)) is not None and new.get(figure) != level
    ]
