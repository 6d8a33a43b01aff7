"""Growth per batch, calculated from the samples at batch boundaries."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pytest_cka_memory import Sample
from pytest_cka_memory.core.retention import full_batches, growth_bytes_per_batch

BATCH = 393_216
MakeSamples = Callable[..., list[Sample]]


def _period_2(count: int, leak: int) -> list[int]:
    return [BATCH * (i % 2) + leak * i for i in range(count)]


@pytest.mark.parametrize(
    ("levels", "growth"),
    [
        pytest.param([1000 + 4 * i for i in range(9)], 4.0, id="leak-of-4-bytes"),
        pytest.param([0, 0, 0, 50, 50, 50, 50, 50, 50], 0.0, id="one-step-then-flat"),
        pytest.param([0, *[50] * 8], 0.0, id="step-in-the-warm-up"),
        pytest.param(_period_2(9, 0), 0.0, id="period-2-clean"),
        pytest.param(_period_2(9, 4), 4.0, id="period-2-and-4-bytes"),
        pytest.param([10 * (i // 2) for i in range(9)], 5.0, id="leak-every-second-batch"),
        pytest.param([7] * 9, 0.0, id="constant"),
        pytest.param([100 - 4 * i for i in range(9)], -4.0, id="shrinking"),
        pytest.param([1000 + i for i in range(9)], 1.0, id="one-byte-a-batch"),
        pytest.param([0, 0, 8, 0, 0, 0, 0, 0, 12], 1.0, id="maxima-more-than-a-half-apart"),
    ],
)
def test_growth_is_the_rise_of_the_upper_level_per_batch(
    samples: MakeSamples, levels: list[int], growth: float
) -> None:
    """Growth is the rise of the upper level: least squares,
    Theil-Sen or the range would be wrong.
    """
    assert growth_bytes_per_batch(samples(levels)) == growth


@pytest.mark.parametrize("count", range(5, 40))
@pytest.mark.parametrize("leak", [0, 1, 4, BATCH + 1])
def test_a_constant_leak_is_exact_for_any_number_of_batches(
    samples: MakeSamples, count: int, leak: int
) -> None:
    """From the fifth batch on, a constant leak is exact, for steady and for alternating levels."""
    assert growth_bytes_per_batch(samples([leak * i for i in range(count)])) == leak
    assert growth_bytes_per_batch(samples(_period_2(count, leak))) == leak


@pytest.mark.parametrize("count", range(5))
def test_too_few_batches_give_no_figure(samples: MakeSamples, count: int) -> None:
    """With too few batches there is no figure, because a growth of 0 would look like a pass."""
    assert growth_bytes_per_batch(samples([0] * count)) is None


@pytest.mark.parametrize(
    ("count", "warmup", "growth"),
    [(4, 0, 4.0), (3, 0, None), (5, 1, 4.0), (6, 3, None), (7, 3, 4.0), (9, 100, None)],
)
def test_warm_up_batches_are_not_judged(
    samples: MakeSamples, count: int, warmup: int, growth: float | None
) -> None:
    """Batches of the warm-up are not judged; growth needs four full
    batches after them, not three.
    """
    levels = [4 * i for i in range(count)]
    assert growth_bytes_per_batch(samples(levels), warmup) == growth


def test_a_cache_that_fills_during_the_warm_up_is_not_growth(samples: MakeSamples) -> None:
    """A cache that fills in the first five batches is growth, unless the warm-up has five."""
    levels = [0, 100, 200, 300, 400, 500, 500, 500, 500]
    assert growth_bytes_per_batch(samples(levels), 1) == 25.0
    assert growth_bytes_per_batch(samples(levels), 5) == 0.0


def test_a_short_last_batch_is_not_judged(samples: MakeSamples) -> None:
    """The tensors of a short last batch are smaller, so that it is not judged."""
    levels = [BATCH] * 8 + [BATCH // 2]
    assert growth_bytes_per_batch(samples(levels, [64] * 8 + [17])) == 0.0
    leaking = [BATCH + 4 * i for i in range(8)] + [0]
    assert growth_bytes_per_batch(samples(leaking, [64] * 8 + [17])) == 4.0


def test_a_single_larger_batch_is_not_judged(samples: MakeSamples) -> None:
    """Only batches of the most frequent size are judged, and a single larger one is not."""
    levels = [BATCH] * 6 + [9 * BATCH] + [BATCH] * 2
    assert growth_bytes_per_batch(samples(levels, [64] * 6 + [576] + [64] * 2)) == 0.0


def test_batches_of_unknown_size_count_as_batches_of_one_size(samples: MakeSamples) -> None:
    """``batch_done()`` in a user's loop may omit the size; such batches count as equal."""
    assert growth_bytes_per_batch(samples([4 * i for i in range(9)], [None] * 9)) == 4.0


def test_full_batches_keep_their_order(samples: MakeSamples) -> None:
    """Batches of full size keep their order in time, from which growth is calculated."""
    kept = full_batches(samples([1, 2, 3, 4, 5], [64, 17, 64, 64, 17]))
    assert [sample.batch for sample in kept] == [1, 3, 4]


def test_an_empty_timeline_has_no_full_batches_and_no_growth() -> None:
    """An empty timeline has no full batches and no growth, and raises no IndexError."""
    assert full_batches([]) == []
    assert growth_bytes_per_batch([]) is None


def test_growth_is_calculated_from_requested_bytes() -> None:
    """Growth is calculated from requested bytes, as blocks on a GPU are larger than that."""
    flat = [
        Sample(i, 64, allocated_bytes=512 * i, requested_bytes=8, peak_bytes=9 * i)
        for i in range(1, 10)
    ]
    assert growth_bytes_per_batch(flat) == 0.0


@pytest.mark.parametrize(
    ("known", "growth"),
    [
        pytest.param(range(1, 17), 40.0, id="all-known"),
        pytest.param([3, 5, 12], 40.0, id="one-known-in-each-half"),
        pytest.param([2, 3, 4, 5, 6, 7], 40.0, id="none-known-in-the-second-half"),
        pytest.param([2, 3], 100.0, id="too-few-known"),
        pytest.param([14], 100.0, id="none-known-in-the-first-half"),
        pytest.param([], 100.0, id="none-known"),
    ],
)
def test_samples_that_may_have_garbage_are_left_out(known: Sequence[int], growth: float) -> None:
    """Growth is the rise between the highest others, divided by the batches between them."""
    timeline = [
        Sample(number, 64, level, level, level, may_have_garbage=number not in known)
        for number in range(1, 17)
        for level in [(40 if number in known else 100) * number]
    ]
    assert growth_bytes_per_batch(timeline) == growth


@pytest.mark.parametrize(
    ("levels", "known", "growth"),
    [
        pytest.param([0, 10, 30, 99, 99, 30, 70, 99, 99], [2, 3, 6, 7], 10.0, id="highest-of-each"),
        pytest.param([0, 0, 40, 40, 80, *[900] * 4], [2, 3, 4, 5], 20.0, id="first-half-known"),
        pytest.param([0, 0, 40, 40, 40, *[900] * 4], [2, 3, 4], 215.0, id="one-too-few-known"),
    ],
)
def test_growth_beside_garbage_is_between_the_highest_other_samples(
    samples: MakeSamples, levels: list[int], known: list[int], growth: float
) -> None:
    """If only the first half has other samples, it is judged alone if it has four of them."""
    timeline = [
        sample if sample.batch in known else replace(sample, may_have_garbage=True)
        for sample in samples(levels)
    ]
    assert growth_bytes_per_batch(timeline) == growth
