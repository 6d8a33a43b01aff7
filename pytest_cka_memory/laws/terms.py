"""A law as users see it: its terms, what it predicts, lines that fit a screen, and a plot."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from pytest_cka_memory.errors import MissingPackageError
from pytest_cka_memory.laws.fitting import Fitted
from pytest_cka_memory.laws.polynomials import number_text, term_text
from pytest_cka_memory.laws.samples import WHOLE
from pytest_cka_memory.units import MB, counted, format_exact

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    how_well = (
        "the law gives each of them" if fitted.is_exact else "no polynomial gives all of them"
    )
    if fitted.is_exact and fitted.switches:
        how_well = f"the law gives each from {_sizes(fitted, fitted.least)} on"
    yield f"{figure} on {device}, in bytes: {counted(runs, 'run')}, {samples}, {how_well}"
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


_STEPS = 200
_BEYOND = 2
"""How many times the largest size that was run is drawn."""


def plot(
    fitted: Fitted, figure: str, name: str, sizes: Mapping[str, int], ax: "Axes | None"
) -> "Axes":
    """Do what :meth:`~pytest_cka_memory.Law.plot` says."""
    if ax is None:
        try:
            from matplotlib import pyplot as plt
        except ImportError as error:
            raise MissingPackageError(
                "plot() needs matplotlib: pip install 'pytest-cka-memory[plot]'"
            ) from error
        ax = plt.subplots()[1]
    index = fitted.names.index(name)
    point = [sizes.get(each, low) for each, low in zip(fitted.names, fitted.least, strict=True)]
    most = _BEYOND * max(sample.point[index] for sample in fitted.samples)
    values = sorted({max(1, most * step // _STEPS) for step in range(_STEPS + 1)})
    points = [(*point[:index], value, *point[index + 1 :]) for value in values]
    for piece in dict.fromkeys(map(fitted.piece_at, points)):
        levels = [float(piece.polynomial.at(each)) / MB for each in points]
        ax.plot(values, levels, linewidth=1, linestyle=":", label=str(piece.polynomial))
    ax.plot(values, [fitted.value_at(each) / MB for each in points], color="black", label="law")
    rest = (*point[:index], *point[index + 1 :])
    measured = [
        sample
        for sample in fitted.samples
        if (*sample.point[:index], *sample.point[index + 1 :]) == rest
    ]
    ax.plot(
        [sample.point[index] for sample in measured],
        [sample.value / MB for sample in measured],
        "o",
        label="measured",
    )
    others = ", ".join(
        f"{each}={value:,}" for each, value in zip(fitted.names, point, strict=True) if each != name
    )
    ax.set_xlabel(name)
    ax.set_ylabel("MB")
    ax.set_title(f"{figure}{f' at {others}' if others else ''}")
    ax.legend(fontsize="small")
    return ax
