"""What a law answers: its terms, what it predicts, a text and a plot, and the largest size.

The largest size that fits a card is what the law says, corrected by runs with that much memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, Protocol

from emulated_cuda.cards import CARDS, CONTEXT_BYTES
from pytest_cka_memory.errors import LimitError, MissingPackageError
from pytest_cka_memory.laws import WHOLE
from pytest_cka_memory.laws.fitting import Fitted
from pytest_cka_memory.laws.polynomials import Point, number_text, term_text
from pytest_cka_memory.units import MB, counted, format_exact, megabytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNKNOWN = "lines whose bytes follow no law"


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
        far = f", {self.times:,.3g} times the largest size that was run" if self.times > 1 else ""
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
        "the law matches all of them" if fitted.is_exact else "no polynomial matches all of them"
    )
    if fitted.is_exact and fitted.switches:
        how_well = f"the law matches all from {_sizes(fitted, fitted.least)} on"
    yield f"{figure} on {device}, in bytes: {counted(runs, 'run')}, {samples}, {how_well}"
    sign = "=" if fitted.is_exact else "≈"
    for number, piece in enumerate(pieces[:_MOST_PIECES]):
        yield f"{'or, if higher,' if number else figure} {sign} {piece.polynomial}"
    if len(pieces) > _MOST_PIECES:
        yield f"or, if higher, {counted(len(pieces) - _MOST_PIECES, 'other piece')}"
    if pieces[0].moment.site is not WHOLE:
        which = "the peak of the first polynomial" if len(pieces) > 1 else "the peak"
        yield f"{which} is at {pieces[0].moment}"
    start = 0
    for number, piece in enumerate(pieces[:_MOST_PIECES]):
        count = len(piece.polynomial.terms)
        if number and count:
            yield f"the highest term of the {_ORDINALS[number]} polynomial, at {piece.moment}"
        for term in terms[start : start + (1 if number else count)]:
            yield from _term(term)
        start += count
    for switch in fitted.switches:
        yield f"note: {switch}"
    if fitted.too_large:
        points = "; ".join(_sizes(fitted, point) for point in fitted.too_large[:_MOST_LINES])
        yield f"note: not checked at {points}, for which the device has too little memory"
    for line in fitted.unfollowed[:_MOST_LINES] if fitted.is_exact else ():
        yield f"note: {line} came close to the peak, but follows no law"
    for point, residual in list(fitted.residuals.items())[:_MOST_LINES]:
        yield (
            f"note: at {_sizes(fitted, point)} the measured figure differs from the law by "
            f"{residual:+,} bytes"
        )


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
                "plot() needs matplotlib, which is not installed; run pip install "
                "'pytest-cka-memory[plot]'"
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


_MOST_RUNS = 14
_MOST_LARGEST = 2**40


class Limited(NamedTuple):
    """A run whose allocator had a limit."""

    fits: bool
    reserved_bytes: int
    """The most that the allocator reserved; if it ran out of memory, until then."""


class LimitedRuns(Protocol):
    """Runs a step with the memory of a smaller card."""

    def reason(self, limit_bytes: int, *, anyway: bool) -> str:
        """Return why it does not run with so much memory; empty if it does.

        Args:
            limit_bytes: what the allocator may reserve.
            anyway: whether to run it also if that takes long.
        """

    def run(self, point: Point, limit_bytes: int) -> Limited:
        """Run the step at some sizes with so much memory."""


class Largest(int):
    """The largest value of a size: an ``int`` that also says how it is known."""

    is_verified: bool = False
    """Whether the step ran with this size in the memory of the card."""
    reserved_bytes: int | None = None
    """The most that the allocator reserved in that run, which has the fragmentation."""
    by_law: int = 0
    """What the law alone says, without a run."""
    how: str = ""
    """How the value is known, in words."""

    @classmethod
    def of(
        cls, value: int, by_law: int, how: str, *, reserved_bytes: int | None = None
    ) -> "Largest":
        """Return a value with what is known of it; it is verified if a reserve is given."""
        largest = cls(value)
        largest.is_verified, largest.reserved_bytes = reserved_bytes is not None, reserved_bytes
        largest.by_law, largest.how = by_law, how
        return largest


def limit_bytes(card: str | None, memory: object) -> int:
    """Return what the allocator of a card can have, or an amount of memory.

    Raises:
        LimitError: if there is neither a card nor `memory`, or both, or the card is not known.
    """
    if (card is None) == (memory is None):
        raise LimitError(
            "largest() needs either a card or an amount of memory; write e.g. largest('batch', "
            "card='h100') or largest('batch', memory='24 GiB')"
        )
    if card is None:
        return megabytes(memory)
    if card not in CARDS:
        raise LimitError(f"unknown card {card!r}; write one of {', '.join(CARDS)}")
    return CARDS[card].total_bytes - CONTEXT_BYTES


def highest(fits: Callable[[int], bool], unbounded: str) -> int:
    """Return the largest number, 1 or more, that fits; 0 if 1 does not.

    Args:
        fits: true up to some number.
        unbounded: the message if every number fits.

    Raises:
        ValueError: if every number fits.
    """
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > _MOST_LARGEST:
            raise ValueError(unbounded)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Search:
    """Looks with few runs for the largest size that fits, near what a law says.

    Args:
        run: runs the step at a size with the memory of the card.
        step: the sizes of the law are multiples of this. If the code raises for other sizes, only
            multiples are tried.
    """

    def __init__(self, run: Callable[[int], Limited], step: int) -> None:
        self._run, self._step, self._unit = run, step, 1
        self._known: dict[int, Limited] = {}

    def verified(self, name: str, by_law: int, at_least: int, memory: str) -> Largest:
        """Return the largest size that was seen to fit.

        Args:
            name: of the size.
            by_law: up to where the law says that it fits.
            at_least: the first size of which the law says that not even the requested bytes fit.
            memory: what it should fit, in words.
        """
        fitting, too_large = 0, max(at_least, by_law + 1)
        size, down = by_law, 1
        while size > 0 and not self._fits(size):
            too_large, down = min(too_large, self._rounded(size)), 2 * down
            size = min(size - 1, size - size * down // 100) if down < 100 else size // 2
        if size > 0:
            fitting = self._rounded(size)
        while len(self._known) < _MOST_RUNS:
            unit, middle = self._unit, self._rounded((fitting + too_large) // 2)
            # The next size runs too, if the law says that it does not fit.
            size = middle if middle > fitting else fitting + unit
            is_last = size == fitting + unit and size in self._known
            if not fitting or (is_last and not self._known[size].fits):
                break
            fits = self._fits(size)
            if self._unit > unit:  # which only now is known
                fitting, too_large = map(self._rounded, (fitting, too_large + self._unit - 1))
            elif fits:
                above = size + max(2 * unit, size // 8) if size >= too_large else too_large
                fitting, too_large = size, above
            else:
                too_large = size
        fitting = max((size for size, run in self._known.items() if run.fits), default=0)
        too_large = fitting + self._unit
        if not fitting:
            how = (
                f"no {name} that was tried ran in {memory}; the smallest was "
                f"{min(self._known, default=0)}"
            )
            return Largest.of(0, by_law, how)
        reserved_bytes = self._known[fitting].reserved_bytes
        next_run = self._known.get(too_large)
        how = f"{name}={fitting:,} ran in {memory} and reserved {reserved_bytes / 2**20:,.0f} MB"
        if next_run is not None and not next_run.fits:
            how += f"; {name}={too_large:,} ran out of memory"
        else:
            how += f"; larger ones may fit, as the search ended after {len(self._known)} runs"
        if self._unit > 1:
            how += f"; only multiples of {self._unit} were tried"
        return Largest.of(fitting, by_law, how, reserved_bytes=reserved_bytes)

    def _rounded(self, size: int) -> int:
        return size // self._unit * self._unit

    def _fits(self, size: int) -> bool:
        size = self._rounded(size)
        if size <= 0:
            return False
        if size not in self._known:
            try:
                self._known[size] = self._run(size)
            except Exception:
                if self._unit > 1 or self._step <= 1 or size % self._step == 0:
                    raise
                # The code takes multiples only, such as a network that halves its pictures.
                self._unit = self._step
                return self._fits(size)
        return self._known[size].fits
