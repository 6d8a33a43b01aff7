"""A law of memory, as users see it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.laws import WHOLE, Moment, Sample
from pytest_cka_memory.laws.answers import (
    UNKNOWN,
    Largest,
    LimitedRuns,
    Prediction,
    Search,
    Term,
    highest,
    limit_bytes,
    lines_of,
    plot,
)
from pytest_cka_memory.laws.fitting import Fitted, Piece
from pytest_cka_memory.laws.polynomials import Exponents, Point, Polynomial, Solver, exponents
from pytest_cka_memory.units import MB, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALL_ROUNDING = 511
"""Bytes by which CUDA's allocator rounds a block up at most."""
_LARGE_ROUNDING = MB + _SMALL_ROUNDING
"""The same of a block that it takes from a larger free one: up to 1 MB is not split off."""
_GROWTHS = ("bounded", "linear", "quadratic")
_LEAST_RISES = 3


class Law:
    """How a figure of memory grows with sizes. ``print(law)`` shows it with its lines.

    Args:
        fitted: the law.
        figure: what it is a law of, such as ``peak``.
        start_bytes: what was live before the step.
        device: what was measured.
        runs: how often the step ran.
        rounds: whether the allocator's blocks are larger than what is requested.
        measure: runs the step at other sizes.
        limited: runs it with less memory.
        unknown_sizes: lines where sizes depend on values that were not computed.
    """

    def __init__(
        self,
        fitted: Fitted,
        *,
        figure: str = "peak",
        start_bytes: int = 0,
        device: str = "",
        runs: int = 0,
        rounds: bool = False,
        measure: Callable[[Point], Sample] | None = None,
        limited: LimitedRuns | None = None,
        unknown_sizes: Sequence[str] = (),
    ) -> None:
        self._fitted, self.figure, self.device, self.runs = fitted, figure, device, runs
        self.start_bytes, self._rounds, self._measure = start_bytes, rounds, measure
        self._limited, self._unknown_sizes = limited, tuple(unknown_sizes)
        self._later: dict[Point, Sample] = {}
        self.elsewhere = ""
        """The device if it is another than that of the session; empty otherwise."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sizes."""
        return self._fitted.names

    @property
    def is_exact(self) -> bool:
        """Whether it gives each sampled figure to the byte, where it holds."""
        return self._fitted.is_exact

    @property
    def residuals(self) -> Mapping[tuple[int, ...], int]:
        """Sizes of a run -> by how many bytes it differs from the law; empty for an exact law."""
        return self._fitted.residuals

    @property
    def pieces(self) -> tuple[Polynomial, ...]:
        """The polynomials, that of the largest run first; the figure is the highest of them."""
        return tuple(piece.polynomial for piece in self._fitted.highest_pieces())

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """The terms of every piece, highest powers first, with the lines that make them."""
        terms = []
        for piece in self._fitted.highest_pieces():
            shares = self._lines(piece)
            for powers, factor in reversed(piece.polynomial.terms):
                lines = sorted(
                    ((line, share[powers]) for line, share in shares.items() if powers in share),
                    key=lambda pair: (-abs(pair[1]), pair[0]),
                )
                named = {n: p for n, p in zip(self.names, powers, strict=True) if p}
                terms.append(Term(named, factor, tuple(lines), str(piece.moment)))
        return tuple(terms)

    def degree(self, name: str) -> int:
        """Return the highest power with which the figure grows in one size.

        It is that of the highest degree of all pieces, so also of a moment that becomes the peak
        only at larger sizes than were run. Of a law that is not exact, it is that of the nearest
        polynomial.

        Args:
            name: of the size.

        Raises:
            ValueError: if the law has no such size.
        """
        self._check((name,), complete=False)
        return max(piece.polynomial.degree(name) for piece in self._fitted.pieces)

    def growth(self, name: str) -> str:
        """Return how the figure grows in one size, in a word.

        A figure without an exact law, such as that of a cache that doubles, is judged by how much
        it rises each time the size is doubled: ``bounded`` if the last doublings add nothing,
        ``logarithmic`` if each adds about as much as the one before.

        Args:
            name: of the size.

        Returns:
            ``bounded``, ``logarithmic``, ``linear``, ``quadratic``, or ``power 3`` and so on.

        Raises:
            ValueError: if the law has no such size.
        """
        degree = self.degree(name)
        if not self.is_exact:
            rises = self._rises(name)
            if len(rises) >= _LEAST_RISES and not any(rises[-2:]):
                return _GROWTHS[0]
            if len(rises) >= _LEAST_RISES and sum(rises[-2:]) <= 3 * max(rises[:2], default=0):
                return "logarithmic"
        return _GROWTHS[degree] if degree < len(_GROWTHS) else f"power {degree}"

    def _rises(self, name: str) -> list[int]:
        """Return by how much the figure rises each time one size is doubled."""
        index = self.names.index(name)
        least = self._fitted.samples[0].point
        on_axis = {
            sample.point[index]: sample.value
            for sample in self._fitted.samples
            if all(sample.point[at] == least[at] for at in range(len(least)) if at != index)
        }
        levels, size = [], min(on_axis)
        while size <= max(on_axis):
            levels += [on_axis[size]] if size in on_axis else []
            size *= 2
        return [after - before for before, after in pairwise(levels)]

    def at(self, *, measure: bool = False, **sizes: int) -> Prediction:
        """Return the figure at some sizes, and how it is known.

        Args:
            measure: run the step there if the prediction has doubts: kernels of libraries may
                switch at sizes that no law shows. On an emulated card without values that is quick.
            **sizes: a value for each size of the law.

        Returns:
            The figure, in bytes, with how it is known and why it may be wrong.

        Raises:
            RegionError: if the step is run and runs out of memory.
            ValueError: if a size is missing, unknown, or not a whole number, 1 or more; or if the
                law was read from a file, and the step is to be run.
        """
        point = self._point(sizes)
        prediction = self._predicted(point)
        if measure and prediction.status != "measured" and prediction.doubts:
            self._later[point] = self._run(point)
            prediction = self._predicted(point)
        return prediction

    def _predicted(self, point: Point) -> Prediction:
        fitted = self._fitted
        sample = next((it for it in fitted.samples if it.point == point), self._later.get(point))
        piece = fitted.piece_at(point)
        value = sample.value if sample is not None else fitted.value_at(point)
        largest = [max(it.point[index] for it in fitted.samples) for index in range(len(point))]
        times = max([1.0, *(size / most for size, most in zip(point, largest, strict=True))])
        status = "measured"
        doubts = tuple(self._doubts_of_sizes())
        if sample is None:
            doubts += tuple(self._doubts(point, piece, times))
            inside = "exact" if fitted.is_exact and not doubts else "approximate"
            status = "extrapolated" if times > 1 or not fitted.holds_at(point) else inside
        return Prediction(
            dict(zip(self.names, point, strict=True)),
            value,
            value + self._rounding(piece),
            self.start_bytes,
            status,
            times,
            str(piece.moment),
            doubts,
        )

    def largest(
        self,
        name: str,
        *,
        card: str | None = None,
        memory: object = None,
        verify: bool | None = None,
        **sizes: int,
    ) -> Largest:
        """Return the largest value of one size for which the step fits a card.

        The law says where to look: its peak counts in blocks of the allocator, at most. Then the
        step runs there with the memory of the card, because the reserve is larger than the peak if
        free blocks cannot be used, and the value is corrected until it ran and the next one did
        not. On an emulated card without values a run takes a fraction of a second.

        Args:
            name: of the size.
            card: the name of a card, such as ``"h100"``; the memory of its context is subtracted.
            memory: instead of it MB (2**20 bytes), or a text such as ``"24 GiB"``.
            verify: whether to run the step. By default it runs if that is cheap and possible: on
                an emulated card without values and on a GPU, if it has as much memory.
            **sizes: a value for each other size of the law.

        Returns:
            The largest value, an ``int`` whose attributes ``is_verified`` and ``how`` say how it is
            known; 0 if 1 does not fit.

        Raises:
            LimitError: if there is neither a card nor `memory`, or both, or the card is not known.
            RegionError: if `verify` is True and the step cannot run with so much memory.
            ValueError: if a size is missing or unknown, or the peak does not grow with `name`.
        """
        limit = limit_bytes(card, memory)
        self._check((name,), complete=False)
        self._point({**sizes, name: 1})

        def at(value: int) -> Prediction:
            return self._predicted(self._point({**sizes, name: value}))

        def fits(value: int) -> bool:
            prediction = at(value)
            return prediction.start_bytes + prediction.at_most_bytes <= limit

        grows = f"the {self.figure} does not grow with {name!r}, so every size fits"
        by_law = highest(fits, grows)
        reason = "" if verify is False else "this law was not measured in this process"
        if self._limited is not None and verify is not False:
            reason = self._limited.reason(limit, anyway=verify is True)
        if reason and verify:
            raise RegionError(f"largest(verify=True) cannot run the step: {reason}")
        if reason or verify is False or self._limited is None:
            why = reason or "verify=False"
            return Largest.of(by_law, by_law, f"by the law alone, without a run ({why})")
        bytes_at = highest(lambda value: at(value).peak_bytes <= limit, grows)
        limited, of_card = self._limited, f"{limit / MB:,.0f} MB"
        search = Search(
            lambda value: limited.run(self._point({**sizes, name: value}), limit),
            self._fitted.steps[self.names.index(name)],
        )
        return search.verified(
            name, by_law, bytes_at + 1, f"the {of_card} of {card}" if card else of_card
        )

    def measure(self, **sizes: int) -> int:
        """Run the step at some sizes and return the figure, to compare it with :meth:`at`.

        Args:
            **sizes: a value for each size of the law.

        Raises:
            ValueError: if a size is missing or unknown, or the law was read from a file.
            RegionError: if the step runs out of memory.
        """
        return self._run(self._point(sizes)).value

    def _run(self, point: Point) -> Sample:
        if self._measure is None:
            raise ValueError(
                "this law was read from a file, so it has no step to run; measure the law again "
                "in this process"
            )
        return self._measure(point)

    def plot(self, name: str | None = None, ax: "Axes | None" = None, **sizes: int) -> "Axes":
        """Draw the law over one size, its pieces and what was measured.

        Args:
            name: of the size; by default the last one.
            ax: where to draw; by default a new figure of matplotlib.
            **sizes: values of the other sizes; by default the smallest.

        Raises:
            MissingPackageError: if matplotlib is not installed.
            ValueError: if the law has no such size.
        """
        name = self.names[-1] if name is None else name
        self._check((name, *sizes), complete=False)
        return plot(self._fitted, self.figure, name, sizes, ax)

    def __repr__(self) -> str:
        return f"<Law of {self.figure}: {self._headline()}>"

    def __str__(self) -> str:
        lines = [*lines_of(self.figure, self.device, self.runs, self._fitted, self.terms)]
        return "\n".join([*lines, *(f"note: {doubt}" for doubt in self._doubts_of_sizes())])

    def _repr_html_(self) -> str:
        """Return the text of the law, which notebooks show as it is."""
        return f"<pre>{escape(str(self))}</pre>"

    def as_arguments(self) -> dict[str, Any]:
        """Return what another process needs to make the same law, without what runs the step."""
        return {
            "fitted": self._fitted,
            "figure": self.figure,
            "start_bytes": self.start_bytes,
            "runs": self.runs,
            "rounds": self._rounds,
            "unknown_sizes": self._unknown_sizes,
        }

    @property
    def fitted(self) -> Fitted:
        """The law as it was found, with its samples."""
        return self._fitted

    def _headline(self) -> str:
        about = "" if self.is_exact else "about "
        first, *rest = self.pieces
        also = f"; or {counted(len(rest), 'other piece')}, if higher" if rest else ""
        return f"{about}{first}{also}"

    def _used(self) -> list[Sample]:
        return [it for it in self._fitted.samples if self._fitted.holds_at(it.point)]

    def _lines(self, piece: Piece) -> dict[str, dict[Exponents, Fraction]]:
        """Return line -> its share of each term; together they are the polynomial."""
        samples = self._used()
        if piece.moment.site not in samples[-1].levels:
            return {}
        compositions = [sample.composition(piece.moment) for sample in samples]
        if not all(compositions):
            return {}
        lines: dict[str, list[int]] = {}
        for number, of_sample in enumerate(compositions):
            for site, size in of_sample.items():
                lines.setdefault(str(site), [0] * len(samples))[number] += size
        points = [sample.point for sample in samples]
        solver = Solver(self.names, points, exponents(self._fitted.degrees))
        shares: dict[str, dict[Exponents, Fraction]] = {}
        left = piece.polynomial
        for line, vector in lines.items():
            law = solver.solve(vector)
            if law is not None:
                shares[line] = dict(law.terms)
                left = left - law
        if shares and left.terms:
            shares[UNKNOWN] = dict(left.terms)
        return shares

    def _doubts_of_sizes(self) -> Iterable[str]:
        if self._unknown_sizes:
            yield (
                f"sizes depend on values that were not computed ({self._unknown_sizes[0]}); "
                "measure the law with values"
            )

    def _doubts(self, point: Point, piece: Piece, times: float) -> Iterable[str]:
        fitted = self._fitted
        if not fitted.is_exact:
            off = max(map(abs, self.residuals.values()), default=0)
            share = max(
                (abs(value) / self._fitted.value_at(at) for at, value in self.residuals.items()),
                default=0,
            )
            yield (
                f"no polynomial matches all measured figures; this one is wrong by up to {off:,} "
                f"bytes, and by up to {share:.2%}"
            )
        if not fitted.holds_at(point):
            sizes = zip(self.names, fitted.least, strict=True)
            least = ", ".join(f"{name}={size:,}" for name, size in sizes)
            yield f"the law holds only from {least} on; below it, the code allocates differently"
        uneven = [
            f"{name} is not a multiple of {step}"
            for name, size, step in zip(self.names, point, fitted.steps, strict=True)
            if size % step
        ]
        if uneven:
            yield f"{' and '.join(uneven)}, but all sizes that were run are; kernels may pad it"
        if times > 1 and fitted.switches:
            yield f"{fitted.switches[-1]}; this may happen again at larger sizes"
        if times > 1 and fitted.unfollowed:
            yield f"{fitted.unfollowed[0]} follows no law and may set the peak at these sizes"
        if times > 1 and not self._was_peak(piece):
            yield f"at these sizes the peak is at another moment than in any run, {piece.moment}"

    def _was_peak(self, piece: Piece) -> bool:
        return any(piece.polynomial.at(it.point) == it.value for it in self._used())

    def _rounding(self, piece: Piece) -> int:
        """Return by how many bytes the allocator's blocks are larger at most."""
        if not self._rounds:
            return 0
        samples = [it for it in self._used() if _has(it, piece.moment)]
        if not samples or piece.moment.site is WHOLE:
            return 0
        first, last = (Counter(it.blocks_at(piece.moment)) for it in (samples[0], samples[-1]))
        # A block that is as small in both runs does not grow.
        fixed = sum(count for size, count in (first & last).items() if size < MB)
        grows = last.total() - fixed
        return fixed * _SMALL_ROUNDING + grows * _LARGE_ROUNDING

    def _point(self, sizes: Mapping[str, int]) -> Point:
        self._check(sizes, complete=True)
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        return tuple(sizes[name] for name in self.names)

    def _check(self, names: Iterable[str], *, complete: bool) -> None:
        names_of_sizes = list(names)
        unknown = [name for name in names_of_sizes if name not in self.names]
        if unknown:
            raise ValueError(
                f"the law has no size {unknown[0]!r}; write one of {', '.join(self.names)}"
            )
        missing = [name for name in self.names if name not in names_of_sizes]
        if complete and missing:
            raise ValueError(f"the size {missing[0]!r} is missing; write e.g. {missing[0]}=1")


def _has(sample: Sample, moment: Moment) -> bool:
    return moment.site in sample.levels and (
        moment.number is None or -1 <= moment.number < len(sample.levels[moment.site])
    )
