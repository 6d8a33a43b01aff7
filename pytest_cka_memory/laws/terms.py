"""What a law consists of, and what it says for some sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from pytest_cka_memory.laws.polynomials import term_text
from pytest_cka_memory.units import format_exact

UNKNOWN = "lines whose bytes follow no law of their own"


@dataclass(frozen=True)
class Term:
    """One term of a law."""

    powers: Mapping[str, int]
    """Name of each size in it -> its power; empty for the constant term."""
    coefficient: Fraction
    """In bytes."""
    lines: tuple[tuple[str, Fraction], ...]
    """Lines whose blocks make the term, with their share of the coefficient; largest first."""
    piece: str
    """The moment that it belongs to: the line that allocates last before it."""

    def __str__(self) -> str:
        names = tuple(self.powers)
        return term_text(names, tuple(self.powers.values()), self.coefficient)


@dataclass(frozen=True)
class Prediction:
    """What a law says for some sizes."""

    sizes: Mapping[str, int]
    requested_bytes: int
    """The figure: for a peak, the bytes that are requested above the level at the start."""
    at_most_bytes: int
    """The most that it is in blocks of the allocator, which rounds."""
    start_bytes: int
    """What was live before the step; the peak of the device is above that."""
    status: str
    """``measured``, ``exact``, ``extrapolated`` or ``approximate``."""
    times: float
    """How many times the largest size that was run the sizes are; 1.0 inside."""
    moment: str
    """The line that allocates last before the peak."""
    doubts: tuple[str, ...] = ()
    """Why an extrapolation may be wrong, as far as the runs show it."""

    @property
    def peak_bytes(self) -> int:
        """With what was live before, in requested bytes."""
        return self.start_bytes + self.requested_bytes

    @property
    def is_safe(self) -> bool:
        """Whether no run gave a reason to doubt it."""
        return not self.doubts

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={value:,}" for name, value in self.sizes.items())
        far = f", {self.times:,.3g} times the largest" if self.times > 1 else ""
        text = f"{sizes}: {format_exact(self.requested_bytes)}, {self.status}{far}"
        return "; ".join([text, *self.doubts])
