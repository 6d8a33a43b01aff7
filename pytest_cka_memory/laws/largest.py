"""The largest size that fits a card: what a law says, corrected by runs with that much memory."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from emulated_cuda.cards import CARDS, CONTEXT_BYTES
from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.laws.polynomials import Point
from pytest_cka_memory.units import megabytes

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
            "largest() needs a card or an amount of memory; write e.g. "
            "largest('batch', card='h100') or largest('batch', memory='24 GiB')"
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
        while too_large - fitting > self._unit and len(self._known) < _MOST_RUNS:
            middle = self._rounded((fitting + too_large) // 2)
            if middle <= fitting:
                break
            fitting, too_large = (middle, too_large) if self._fits(middle) else (fitting, middle)
        if not fitting:
            how = f"no {name} ran in {memory}, down to {min(self._known, default=0)}"
            return Largest.of(0, by_law, how)
        reserved_bytes = self._known[fitting].reserved_bytes
        above = self._known.get(too_large)
        how = f"{name}={fitting:,} ran in {memory} and reserved {reserved_bytes / 2**20:,.0f} MB"
        if above is not None and not above.fits:
            how += f"; {name}={too_large:,} ran out of memory"
        elif too_large == at_least:
            how += f"; of {name}={too_large:,} the law says that it does not fit"
        if self._unit > 1:
            how += f"; multiples of {self._unit} were tried"
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
