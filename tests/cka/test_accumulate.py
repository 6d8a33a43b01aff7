"""Sums over batches, and the standard error that comes out of them."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from cka.functional.hsic import hsic_products
from cka.functional.kernels import linear_gram
from cka.functional.sums import compute, empty, flatten, merge, of_batch, pick, unflatten


def batch_terms(count: int, rows: int = 3, columns: int = 2, samples: int = 16):
    """HSIC terms of related random features, a tuple per batch."""
    generator = torch.Generator().manual_seed(count)
    terms = []
    for _ in range(count):
        base = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
        noise = torch.randn(rows + columns, samples, 6, generator=generator, dtype=torch.float64)
        grams = [linear_gram(base + one) for one in noise]
        terms.append(hsic_products(grams[:rows], grams[rows:], "unbiased"))
    return terms


def summed(terms):
    total = of_batch(*terms[0])
    for one in terms[1:]:
        total = merge(total, of_batch(*one))
    return total


def plain_cka(terms):
    cross, own1, own2 = (torch.stack(parts).sum(0) for parts in zip(*terms, strict=True))
    return cross / (own1[:, None] * own2[None, :]).sqrt()


def test_the_ratio_is_taken_after_the_sums():
    """CKA is Σs12 / √(Σs11 Σs22)."""
    terms = batch_terms(5)
    torch.testing.assert_close(compute(summed(terms))[0], plain_cka(terms))


def test_the_standard_error_is_the_influence_of_single_batches():
    """The streamed sums give √(B/(B-1) Σd_b²) as computed batch by batch."""
    terms = batch_terms(6)
    cka = plain_cka(terms)
    cross, own1, own2 = (torch.stack(parts) for parts in zip(*terms, strict=True))
    one, two = own1.sum(0)[:, None], own2.sum(0)[None, :]
    moves = cross / (one * two).sqrt() - cka / 2 * (own1[:, :, None] / one + own2[:, None] / two)
    expected = (moves.square().sum(0) * 6 / 5).sqrt()
    torch.testing.assert_close(compute(summed(terms))[1], expected, rtol=1e-9, atol=1e-12)


def test_the_standard_error_agrees_with_leaving_batches_out():
    """To first order it is the delete-one-batch jackknife: 40 batches agree within 5 %."""
    terms = batch_terms(40)
    left_out = torch.stack([plain_cka(terms[:at] + terms[at + 1 :]) for at in range(40)])
    spread = (left_out - left_out.mean(0)).square().sum(0)
    torch.testing.assert_close(
        compute(summed(terms))[1], (spread * 39 / 40).sqrt(), rtol=0.05, atol=0
    )


def test_one_batch_has_no_standard_error():
    """Spread needs two batches; one gives NaN rather than 0."""
    matrix, error = compute(summed(batch_terms(1)))
    assert error.isnan().all()
    assert not matrix.isnan().any()
    assert not compute(summed(batch_terms(2)))[1].isnan().any()


def test_sums_merge_in_any_grouping():
    """Batches, ranks and re-runs take the same path."""
    terms = batch_terms(4)
    whole = flatten(summed(terms))
    parts = flatten(merge(summed(terms[:1]), summed(terms[1:])))
    torch.testing.assert_close(whole, parts)
    nothing = empty(3, 2, torch.float64, torch.device("cpu"))
    assert torch.equal(flatten(merge(summed(terms), nothing)), whole)


def test_flatten_has_an_inverse():
    """What ranks exchange can be put back into the same fields."""
    total = summed(batch_terms(2))
    back = unflatten(flatten(total), total)
    assert torch.equal(back.cross_self2, total.cross_self2)
    assert back.estimates == 2


def test_picked_rows_are_those_computed_alone():
    """Rows and columns may be left out, reordered and repeated without changing values."""
    total = summed(batch_terms(3))
    rows, columns = torch.tensor([2, 0, 2]), torch.tensor([1])
    whole = compute(total)
    for found, all_of_it in zip(compute(pick(total, rows, columns)), whole, strict=True):
        torch.testing.assert_close(found, all_of_it[rows][:, columns])


def test_a_constant_layer_alone_is_nan():
    """0/0 touches its own row only."""
    terms = [(cross.clone(), own1.clone(), own2) for cross, own1, own2 in batch_terms(2)]
    for cross, own1, _ in terms:
        cross[1], own1[1] = 0, 0
    matrix, error = compute(summed(terms))
    assert matrix[1].isnan().all()
    assert error[1].isnan().all()
    assert not matrix[[0, 2]].isnan().any()


@pytest.mark.parametrize("slab_bytes", [1, 3 * 16 * 8, 2**20], ids=["row", "one-row", "whole"])
def test_slabs_do_not_change_hsic(monkeypatch, slab_bytes):
    """However few rows are centred at a time, the products are the same."""
    grams = [linear_gram(torch.randn(16, 9, dtype=torch.float64)) for _ in range(3)]
    expected = hsic_products(grams, grams, "unbiased")
    # The package's attribute of this name is the public function.
    monkeypatch.setattr(import_module("cka.functional.hsic"), "_SLAB_BYTES", slab_bytes)
    for estimator_input in (grams, None):
        found = hsic_products(grams, estimator_input, "unbiased")
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
