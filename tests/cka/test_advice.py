"""A comparison says once if smaller parts of its batches would at least halve its time."""

from __future__ import annotations

import warnings

import pytest
import torch
from cka_nets import batches_of
from torch import nn

from cka import CKA, CKAWarning, compare_many
from cka.running import SmallerParts


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def advice_after(batches, samples=1024, outputs=10):
    """Return what is said after each batch of (seconds in Gram matrices, other seconds)."""
    clock = Clock()
    parts = SmallerParts(clock)
    said = []
    for measured, other in batches:
        with parts.measuring(outputs):
            clock.now += measured
        clock.now += other
        said.append(parts.batch_done(samples))
    return said


def test_advice_is_given_once_after_the_third_batch():
    """If Gram matrices take most of the time of two batches, the third one ends with advice."""
    said = advice_after([(8.0, 2.0)] * 5)
    assert [one is not None for one in said] == [False, False, True, False, False]
    assert said[2].startswith("80% of the time goes into Gram matrices of 1024 samples; ")
    assert "hsic_batch_size=64 to take less than half" in said[2]


@pytest.mark.parametrize(
    ("batches", "samples"),
    [
        pytest.param([(8.0, 2.0)] * 2, 1024, id="two-batches"),
        pytest.param([(8.0, 2.0), (8.0, 2.0), (5.0, 5.0)], 1024, id="batches-disagree"),
        pytest.param([(5.8, 4.2)] * 3, 1024, id="little-more-than-half-is-saved"),
        pytest.param([(8.0, 2.0)] * 3, 127, id="two-parts-do-not-fit"),
        pytest.param([(0.0, 1.0)] * 3, 0, id="batches-that-are-too-small"),
        pytest.param([(0.008, 0.002)] * 3, 1024, id="calls-cost-as-much-as-they-save"),
    ],
)
def test_no_advice_is_given_without_a_reason(batches, samples):
    """There is no advice unless parts would halve the time of both batches."""
    assert advice_after(batches, samples) == [None] * len(batches)


def test_first_batch_does_not_count():
    """The first batch is slow for other reasons."""
    assert advice_after([(0.0, 100.0), (8.0, 2.0), (8.0, 2.0)])[2] is not None


WIDE = nn.Sequential(nn.Flatten(), nn.Identity())


def messages(call):
    """Return the CKAWarnings of a call, as (file, text)."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [(one.filename, str(one.message)) for one in found if one.category is CKAWarning]


@pytest.mark.slow
def test_comparison_of_large_batches_says_what_would_halve_its_time():
    """A model without arithmetic spends its time in Gram matrices; the caller's line is named."""
    batches = batches_of(*[1500] * 3, features=(4096,))
    found = messages(lambda: CKA(WIDE, device="cpu").compare(batches, progress=False))
    assert [(file, text.split("; pass ")[1].split(" to ")[0]) for file, text in found] == [
        (__file__, "hsic_batch_size=64")
    ]
    models = {"one": WIDE, "other": nn.Sequential(nn.Flatten(), nn.Identity())}
    found = messages(lambda: compare_many(models, batches, device="cpu", progress=False))
    assert [file for file, _ in found] == [__file__]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"hsic_batch_size": 64}, id="parts"),
        pytest.param({"kernel": lambda rows: rows @ rows.T}, id="own-kernel"),
        pytest.param({"estimator": "exact"}, id="exact"),
    ],
)
def test_comparison_that_cannot_follow_the_advice_does_not_give_it(settings):
    """Where parts are set, do not exist, or have an unknown cost, nothing is said."""
    batches = batches_of(*[600] * 4, features=(4096,))
    cka = CKA(WIDE, device="cpu", **settings)
    assert messages(lambda: cka.compare(batches, progress=False)) == []


def test_comparison_of_a_network_with_much_arithmetic_gives_no_advice():
    """Convolutions take more time than the Gram matrices of 128 samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU())
    batches = batches_of(*[128] * 4, features=(3, 12, 12))
    assert messages(lambda: CKA(model, device="cpu").compare(batches, progress=False)) == []
