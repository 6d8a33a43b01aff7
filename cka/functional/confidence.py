"""Confidence of CKA by a bootstrap: how much each value would vary with other samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cka.functional.sums import Sums, cka_scale

SHARE = 0.95


@dataclass(frozen=True, eq=False)
class Confidence:
    """Standard error and 95 % interval of the CKA of every pair, by a bootstrap over samples.

    The samples of each batch are drawn N times with replacement (Efron 1979, "Bootstrap Methods"),
    and CKA is computed from the Gram matrices, whose samples have the weights that were drawn. The
    models, the batches' sizes and the kernel's bandwidth are fixed. So this estimates how much CKA
    would vary with other samples from the same source, like ``CKAResult.standard_error``. That one
    compares whole batches; it is unreliable for few batches, and unknown for one.

    If a resample repeats a sample, the unbiased HSIC must not count the pair of the sample and
    itself. HSIC of a resample is therefore a weighted mean over sets of four different samples
    (Janssen 1994, "Weighted bootstrapping of U-statistics").

    Limits:

    - Samples must be independent, which frames of one video are not.
    - If two layers are unrelated, the errors are about √3 times too large, because a U-statistic is
      then degenerate (Arcones & Giné 1992, "On the bootstrap of U and V statistics"). Whether a
      value is above chance is a question for ``null``.
    - Batches, or parts of ``hsic_batch_size``, of fewer than about 16 samples have too few
      different resamples.
    - Errors and intervals are NaN if a layer's resampled HSIC with itself is not positive, as is
      possible for a few samples of a layer that is almost constant.
    """

    standard_error: Tensor
    """Standard deviation of CKA over the resamples, with divisor N - 1, (L1, L2), float64 on the
    CPU."""
    low: Tensor
    """Lower limit of the 95 % interval, (L1, L2). It is the basic interval (Davison & Hinkley 1997,
    "Bootstrap Methods and their Application", ch. 5): from 2 CKA - q to 2 CKA - p for the quantiles
    p and q of the resampled values, and not above 1. It allows for the bias of the estimator."""
    high: Tensor
    """Upper limit of the 95 % interval, (L1, L2)."""
    resamples: int
    """N. The limits need about 200 or more."""

    def __str__(self) -> str:
        return f"{SHARE:.0%} intervals by {self.resamples} resamples"

    def __repr__(self) -> str:
        return f"<Confidence: {self}>"


def confidence(sums: Sums, resampled: Tensor, positions: Sequence[Tensor]) -> Confidence:
    """Return the confidence of CKA (L1, L2) by its values in N resamples.

    Args:
        sums: HSIC of the L1 and L2 layers as they are.
        resampled: HSIC of P pairs of outputs in N resamples, (N, P).
        positions: position in ``resampled`` of each pair of layers, (L1, L2), and of each layer's
            pair with itself, (L1,) and (L2,).
    """
    cross, rows, columns = positions
    cka = sums.cross / cka_scale(sums)
    error, low, high = (torch.empty_like(cka) for _ in range(3))
    tails = torch.tensor([(1 - SHARE) / 2, (1 + SHARE) / 2], dtype=torch.float64, device="cpu")
    tails = tails.to(cka.dtype).to(cka.device)
    own = resampled[:, columns]
    # A row at a time, so that the working space is that of N L2 numbers.
    for at in range(len(cka)):
        one = resampled[:, rows[at], None]
        scale = (one * own).sqrt().masked_fill((one < 0) | (own < 0), torch.nan)
        values = resampled[:, cross[at]] / scale
        error[at] = values.std(0)
        lowest, highest = values.quantile(tails, 0)
        low[at] = (2 * cka[at] - highest).clamp(max=1)
        high[at] = (2 * cka[at] - lowest).clamp(max=1)
    return Confidence(error.to("cpu"), low.to("cpu"), high.to("cpu"), len(resampled))
