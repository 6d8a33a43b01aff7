"""Sums of HSIC terms over batches, and CKA with its standard error from them."""

from __future__ import annotations

import pytest
import torch

from cka import functional
from cka.functional import hsic_products
from cka.functional.kernels import linear_gram
from cka.functional.sums import (
    batch_sums,
    cka_with_error,
    merge_sums,
    select_sums,
    sums_to_vector,
    vector_to_sums,
    zero_sums,
)


def batch_terms(count: int, rows: int = 3, columns: int = 2, samples: int = 16):
    """Return the HSIC terms of related random features, one tuple per batch."""
    generator = torch.Generator().manual_seed(count)
    terms = []
    for _ in range(count):
        base = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
        noise = torch.randn(rows + columns, samples, 6, generator=generator, dtype=torch.float64)
        grams = [linear_gram(base + one) for one in noise]
        terms.append(hsic_products(grams[:rows], grams[rows:], "unbiased"))
    return terms


def summed(terms):
    total = batch_sums(*terms[0])
    for one in terms[1:]:
        total = merge_sums(total, batch_sums(*one))
    return total


def plain_cka(terms):
    cross, own1, own2 = (torch.stack(parts).sum(0) for parts in zip(*terms, strict=True))
    return cross / (own1[:, None] * own2[None, :]).sqrt()


def test_cka_is_the_ratio_of_the_summed_terms():
    """CKA is the ratio of the sums over batches: Σs12 / √(Σs11 Σs22)."""
    terms = batch_terms(5)
    torch.testing.assert_close(cka_with_error(summed(terms))[0], plain_cka(terms))


def test_standard_error_is_the_root_of_summed_squared_influences():
    """The standard error from sums is √(B/(B-1) Σd_b²), with d_b computed batch by batch."""
    terms = batch_terms(6)
    cka = plain_cka(terms)
    cross, own1, own2 = (torch.stack(parts) for parts in zip(*terms, strict=True))
    one, two = own1.sum(0)[:, None], own2.sum(0)[None, :]
    moves = cross / (one * two).sqrt() - cka / 2 * (own1[:, :, None] / one + own2[:, None] / two)
    expected = (moves.square().sum(0) * 6 / 5).sqrt()
    torch.testing.assert_close(cka_with_error(summed(terms))[1], expected, rtol=1e-9, atol=1e-12)


def test_standard_error_agrees_with_the_delete_one_batch_jackknife():
    """The standard error agrees with the delete-one-batch jackknife within 5 % for 40 batches."""
    terms = batch_terms(40)
    left_out = torch.stack([plain_cka(terms[:at] + terms[at + 1 :]) for at in range(40)])
    spread = (left_out - left_out.mean(0)).square().sum(0)
    torch.testing.assert_close(
        cka_with_error(summed(terms))[1], (spread * 39 / 40).sqrt(), rtol=0.05, atol=0
    )


def test_standard_error_of_one_batch_is_nan():
    """One batch has no standard error, which is NaN, but CKA itself is defined for it."""
    matrix, error = cka_with_error(summed(batch_terms(1)))
    assert error.isnan().all()
    assert not matrix.isnan().any()
    assert not cka_with_error(summed(batch_terms(2)))[1].isnan().any()


def test_merged_sums_do_not_depend_on_the_grouping():
    """Sums may be merged in any grouping, and sums of no batches change nothing."""
    terms = batch_terms(4)
    whole = sums_to_vector(summed(terms))
    parts = sums_to_vector(merge_sums(summed(terms[:1]), summed(terms[1:])))
    torch.testing.assert_close(whole, parts)
    zeros = zero_sums(3, 2, torch.float64, torch.device("cpu"))
    assert torch.equal(sums_to_vector(merge_sums(summed(terms), zeros)), whole)


def test_vector_to_sums_undoes_sums_to_vector():
    """Sums that are converted to a vector and back have the same fields and shapes."""
    total = summed(batch_terms(2))
    back = vector_to_sums(sums_to_vector(total), total)
    assert torch.equal(back.cross_self2, total.cross_self2)
    assert back.estimates == 2


def test_selected_sums_give_the_selected_values():
    """Rows and columns can be left out, reordered and repeated without changing their values."""
    total = summed(batch_terms(3))
    rows, columns = torch.tensor([2, 0, 2]), torch.tensor([1])
    whole = cka_with_error(total)
    for found, all_values in zip(
        cka_with_error(select_sums(total, rows, columns)), whole, strict=True
    ):
        torch.testing.assert_close(found, all_values[rows][:, columns])


def test_only_the_row_of_a_constant_layer_is_nan():
    """HSIC of a constant layer with itself is 0, and 0/0 is NaN in the layer's row only."""
    terms = [(cross.clone(), own1.clone(), own2) for cross, own1, own2 in batch_terms(2)]
    for cross, own1, _ in terms:
        cross[1], own1[1] = 0, 0
    matrix, error = cka_with_error(summed(terms))
    assert matrix[1].isnan().all()
    assert error[1].isnan().all()
    assert not matrix[[0, 2]].isnan().any()


@pytest.mark.parametrize("slab_bytes", [1, 3 * 16 * 8, 2**20], ids=["row", "one-row", "whole"])
def test_number_of_rows_centred_at_a_time_does_not_change_hsic(monkeypatch, slab_bytes):
    """HSIC is the same if rows are centred one at a time, a few at a time, or all together."""
    grams = [linear_gram(torch.randn(16, 9, dtype=torch.float64)) for _ in range(3)]
    expected = hsic_products(grams, grams, "unbiased")
    monkeypatch.setattr(functional, "SLAB_BYTES", slab_bytes)
    for grams_y in (grams, None):
        found = hsic_products(grams, grams_y, "unbiased")
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("first", [None, ((3, -2), (0, 5, 1))], ids=["zeros", "exponents"])
def test_sums_with_exponents_are_added_by_their_true_size(first):
    """The sum of two sums with exponents has the higher exponent of each layer."""
    terms = [terms_of(seed) for seed in range(2)]
    second = ((1, 4), (2, -6, 0))
    added = merge_sums(
        batch_sums(*terms[0], exponents=first), batch_sums(*terms[1], exponents=second)
    )
    assert added.exponents == (((3, 4), (2, 5, 1)) if first else ((1, 4), (2, 0, 0)))
    true = merge_sums(
        *(
            batch_sums(*true_terms(*one, *(exponents or ((0, 0), (0, 0, 0)))))
            for one, exponents in zip(terms, (first, second), strict=True)
        )
    )
    for found, expected in zip(cka_with_error(added), cka_with_error(true), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def terms_of(seed):
    """Return positive terms s12 (2, 3), s11 (2,) and s22 (3,)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 3), (2,), (3,))
    return [torch.rand(s, generator=generator, dtype=torch.float64) + 0.5 for s in shapes]


def true_terms(cross, self1, self2, exponents1, exponents2):
    """Return the terms of the Gram matrices times 2**exponent."""
    one = 2.0 ** torch.tensor(exponents1, dtype=torch.float64)
    two = 2.0 ** torch.tensor(exponents2, dtype=torch.float64)
    return cross * one[:, None] * two, self1 * one**2, self2 * two**2
