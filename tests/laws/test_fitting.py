"""The law of a scripted code is found from few runs; what is not known is said."""

from collections.abc import Callable

import pytest

from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.laws import OLDER, Block, Moment, RecordedSample, Sample, Site
from pytest_cka_memory.laws.fitting import Fitted, fit, law_through
from pytest_cka_memory.laws.law import Law
from pytest_cka_memory.laws.polynomials import Point, exponents, nearest

LOSS, BACKWARD, STEP = (Site((f"train.py:{line} in step",), code) for line, code in (
    (1, "loss(x)"), (2, "backward()"), (3, "step()")))  # fmt: skip


def levels(*laws: tuple[Site, Callable[..., int]]) -> Callable[[Point], Sample]:
    """Return code whose level at some lines follows these laws."""

    def measure(point: Point) -> Sample:
        found: dict[Site, list[int]] = {}
        for site, law in laws:
            found.setdefault(site, []).append(law(*point))
        return Sample(point, max(map(max, found.values())), found)

    return measure


def texts(fitted: Fitted) -> set[str]:
    return {str(piece.polynomial) for piece in fitted.pieces}


def test_linear_law_needs_three_runs() -> None:
    """Two determine it, the third verifies it."""
    fitted = fit(levels((LOSS, lambda n: 7 + 5 * n)), {"n": (1, 2, 4)})
    assert texts(fitted) == {"7 + 5 · n"}
    assert (fitted.is_exact, len(fitted.samples), fitted.residuals) == (True, 3, {})


def test_two_values_are_extended_by_one() -> None:
    """Two runs fit every line, so a third value is chosen."""
    fitted = fit(levels((LOSS, lambda n: 7 + 5 * n)), {"n": (128, 256)})
    assert [sample.point for sample in fitted.samples] == [(128,), (256,), (512,)]
    assert texts(fitted) == {"7 + 5 · n"}


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_higher_degrees_are_found_with_six_values_at_most(degree: int) -> None:
    """Further values are chosen until one more than needed follows the law."""
    fitted = fit(levels((LOSS, lambda n: 3 + n**degree)), {"n": (128, 256, 512)})
    assert fitted.is_exact
    assert fitted.pieces[0].polynomial.degree("n") == degree
    assert len(fitted.samples) == degree + 2


def test_cross_terms_of_two_sizes_are_found() -> None:
    """The term batch · seq² is found from five runs with one size changed, and four with both."""
    measure = levels((LOSS, lambda b, s: 9 + 2 * b + 4 * b * s * s))
    fitted = fit(measure, {"b": (1, 2, 4), "s": (8, 16, 32)})
    assert texts(fitted) == {"9 + 2 · b + 4 · b · s²"}
    assert len(fitted.samples) == 9


def test_a_piece_is_known_that_was_never_the_peak() -> None:
    """The square is below the line in every run, and above it later."""
    measure = levels((LOSS, lambda n: 1_000_000 + 5 * n), (BACKWARD, lambda n: 2 * n * n))
    law = Law(fit(measure, {"n": (8, 16, 32)}))
    assert law.degree("n") == 2
    assert law.at(n=10_000).requested_bytes == 200_000_000
    assert law.at(n=100).requested_bytes == 1_000_500
    assert law.at(n=10_000).status == "extrapolated"
    assert "the peak is at another moment than in any run" in law.at(n=10_000).doubts[0]


def test_one_number_with_two_pieces_holds_from_the_second_on() -> None:
    """Without moments, the law is that of the larger sizes, and says so."""
    fitted = fit(lambda p: Sample(p, max(5_000, 5 * p[0])), {"n": (500, 800, 1_100, 1_200, 1_300)})
    assert (texts(fitted), fitted.least) == ({"5 · n"}, (1_100,))
    prediction = Law(fitted).at(n=600)
    assert not prediction.is_safe
    assert "holds only from n=1,100 on" in prediction.doubts[0]


def test_a_switch_by_size_is_named_with_its_line() -> None:
    """From 1,024 on another kernel takes a workspace; the law is that of the larger sizes."""

    def measure(point: Point) -> Sample:
        (n,) = point
        more = [90 * n + 1_000_000] if n >= 1_024 else []
        return Sample(point, max([80 * n, *more]), {LOSS: [80 * n, *more]})

    law = Law(fit(measure, {"n": (256, 512, 1_024)}))
    assert law.pieces[0].at((4_096,)) == 90 * 4_096 + 1_000_000
    assert "between n=512 and n=1,024 the code allocates differently" in str(law)
    assert "train.py:1 in step: loss(x) (1 and 2 allocations)" in str(law)
    assert not law.at(n=16 * 4_096).is_safe


def test_a_switch_of_two_sizes_together_is_found() -> None:
    """The kernel depends on batch · seq, so each size alone shows nothing."""

    def measure(point: Point) -> Sample:
        b, s = point
        size = 8 * b * s if b * s < 1_000 else 8 * b * s + 4_096 * b
        return Sample(point, size, {LOSS: [size]})

    fitted = fit(measure, {"b": (1, 2, 4), "s": (128, 256, 512)})
    assert texts(fitted) == {"4,096 · b + 8 · b · s"}
    assert fitted.least == (4, 512)
    assert fitted.switches


def limited(most: int, measure: Callable[[Point], Sample]) -> Callable[[Point], Sample]:
    """Return code that runs out of memory where it takes more."""

    def measure_if_it_fits(point: Point) -> Sample:
        sample = measure(point)
        if sample.value > most:
            raise RegionError(f"no memory for {point}")
        return sample

    return measure_if_it_fits


def test_sizes_that_do_not_fit_together_are_left_out() -> None:
    """The largest sizes together need more than the device has, or a grid beyond them does."""
    law = levels((LOSS, lambda b, s: 9 + 2 * b + 4 * b * s * s))
    fitted = fit(limited(9_000, law), {"b": (1, 2, 4), "s": (8, 16, 32)})
    assert texts(fitted) == {"9 + 2 · b + 4 · b · s²"}
    assert fitted.too_large[:2] == ((1, 64), (4, 32))
    assert "note: not checked at b=1, s=64; b=4, s=32" in str(Law(fitted))

    def switching(point: Point) -> Sample:
        b, s = point
        size = 8 * b * s if b * s < 1_000 else 8 * b * s + 4_096 * b
        return Sample(point, size, {LOSS: [size]})

    most = switching((4, 512)).value
    fitted = fit(limited(most, switching), {"b": (1, 2, 4), "s": (128, 256, 512)})
    assert not fitted.is_exact
    assert all(sample.value <= most for sample in fitted.samples)
    assert fitted.too_large


@pytest.mark.parametrize("values", [(1, 2, 4), (1, 10, 100)])
def test_law_that_nothing_has_verified_is_an_error(values: tuple[int, ...]) -> None:
    """If the device has no memory for two larger sizes together, terms of both are unknown."""

    def stepping(point: Point) -> Sample:
        b, s = point
        size = 1_000 + 8 * b * s + (10**6 if min(b, s) > 1 else 0)
        return Sample(point, size, {LOSS: [size]})

    with pytest.raises(RegionError, match="no memory for"):
        fit(limited(10**5, stepping), {"b": values, "s": values})


@pytest.mark.parametrize("most", [5 * 2, 5 * 3])
def test_device_that_is_full_after_two_sizes_has_no_law(most: int) -> None:
    """A third size is needed to verify a law: without it the error says so, and nothing hangs."""
    with pytest.raises(RegionError, match="no memory for"):
        fit(limited(most, levels((LOSS, lambda n: 5 * n))), {"n": (1, 2)})


def test_law_is_found_without_sizes_that_the_device_has_no_memory_for() -> None:
    """Further values of a size are chosen below the largest if its double does not fit."""
    law = levels((LOSS, lambda n: 5 * n + 9), (BACKWARD, lambda n: 6 * n + 10 * (n // 6)))
    fitted = fit(limited(300, law), {"n": (8, 16, 32)})
    assert {sample.point[0] for sample in fitted.samples} == {8, 16, 24, 32}
    assert (64,) in fitted.too_large


def test_a_line_that_allocates_more_often_does_not_hide_the_peak() -> None:
    """A larger size adds a small block after the peak of the same line."""

    def measure(point: Point) -> Sample:
        (n,) = point
        found = [100 * n, 10] if n < 30 else [100 * n, 30, 10]
        return Sample(point, 100 * n, {BACKWARD: found})

    fitted = fit(measure, {"n": (10, 20, 40)})
    assert (texts(fitted), fitted.is_exact, fitted.switches) == ({"100 · n"}, True, ())


def test_a_loop_over_a_size_has_a_law() -> None:
    """Its highest level counts, and its first and last moments."""

    def measure(point: Point) -> Sample:
        (n,) = point
        return Sample(point, n * (n + 1) // 2, {LOSS: [i * (i + 1) // 2 for i in range(1, n + 1)]})

    fitted = fit(measure, {"n": (4, 8, 16)})
    assert fitted.value_at((1_000,)) == 500_500
    assert fitted.is_exact


@pytest.mark.parametrize("rounding", [512, 2 * 2**20])
def test_rounding_is_a_residual_and_not_smoothed(rounding: int) -> None:
    """A figure in blocks is no polynomial: the law says how far it is from each sample."""

    def measure(point: Point) -> Sample:
        return Sample(point, -(-point[0] * 1_000_003 // rounding) * rounding)

    law = Law(fit(measure, {"n": (1, 2, 3, 5, 8, 13)}, needed_spare=2))
    assert not law.is_exact
    assert law.degree("n") == 1
    assert law.residuals
    assert max(map(abs, law.residuals.values())) < rounding
    prediction = law.at(n=100)
    assert "no polynomial matches all measured figures" in prediction.doubts[0]
    assert abs(prediction.requested_bytes - 100_000_300) < 100 * rounding
    assert "≈" in str(law)


def test_sizes_beside_the_sampled_steps_are_doubted() -> None:
    """Kernels pad to multiples of 128, which no sample shows."""
    law = Law(fit(levels((LOSS, lambda n: 8 * n)), {"n": (128, 256, 512)}))
    assert (law.at(n=384).status, law.at(n=384).doubts) == ("exact", ())
    assert "n is not a multiple of 128" in law.at(n=130).doubts[0]


def test_what_is_said_of_a_value_is_how_it_is_known() -> None:
    """Measured, exact inside, extrapolated beyond, with how far."""
    law = Law(fit(levels((LOSS, lambda n: 8 * n)), {"n": (2, 4, 8)}))
    assert [law.at(n=n).status for n in (4, 6, 16)] == ["measured", "exact", "extrapolated"]
    assert law.at(n=32).times == 4
    expected = "n=32: 256 bytes, extrapolated, 4 times the largest size that was run"
    assert str(law.at(n=32)) == expected


def test_composition_of_a_recorded_run_adds_up_to_the_level() -> None:
    """What is live at a moment, by line; memory from before that was freed counts less."""
    blocks = [Block(100, 1, 4, LOSS), Block(30, 2, 0, BACKWARD), Block(7, 0, 3, OLDER),
              Block(50, 5, 0, STEP)]  # fmt: skip
    sample = RecordedSample((1,), blocks)
    assert sample.value == 130
    assert sample.levels == {LOSS: [100], BACKWARD: [130], STEP: [73]}
    found = sample.composition(Moment(STEP, 0))
    assert found == {BACKWARD: 30, OLDER: -7, STEP: 50}
    assert sum(found.values()) == sample.at(Moment(STEP, None)) == 73
    assert sample.blocks_at(Moment(STEP, -1)) == [30, 50]


def test_published_reserve_has_no_law_and_its_first_runs_mislead() -> None:
    """The reserve of YOLOv8n on an RTX 4090, in MB, from ultralytics#1451: AutoBatch fits a line.

    The allocator reserves whole segments, so the first three runs rise by less than the others.
    """
    table = {1: 285, 2: 445, 4: 470, 8: 719, 16: 1197}
    samples = [Sample((batch,), reserved) for batch, reserved in table.items()]
    assert all(law_through(["batch"], samples, (degree,)) is None for degree in (1, 2, 3))

    def slope(batches: list[int]) -> float:
        values = [table[batch] for batch in batches]
        law = nearest(["batch"], [(batch,) for batch in batches], exponents((1,)), values)
        return float(law.at((1,)) - law.at((0,)))

    assert slope([1, 2, 4]) == pytest.approx(54.6, abs=0.1)
    assert slope([4, 8, 16]) == pytest.approx(60.4, abs=0.1)
