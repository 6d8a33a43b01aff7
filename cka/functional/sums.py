"""From HSIC terms of batches to CKA: pure update, merge and compute.

Nguyen et al. 2020, eq. 2: HSIC is summed over batches first, and only then the ratio is taken.
Batches, ranks and re-runs take the same path, since every field is a plain sum.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Sums over batches of the terms s12 (L1, L2), s11 (L1,) and s22 (L2,), and of products."""

    cross: Tensor
    """Σ s12, (L1, L2)."""
    self1: Tensor
    """Σ s11, (L1,)."""
    self2: Tensor
    """Σ s22, (L2,)."""
    cross_cross: Tensor
    """Σ s12², (L1, L2)."""
    cross_self1: Tensor
    """Σ s12 s11, (L1, L2)."""
    cross_self2: Tensor
    """Σ s12 s22, (L1, L2)."""
    self1_self1: Tensor
    """Σ s11², (L1,)."""
    self1_self2: Tensor
    """Σ s11 s22, (L1, L2)."""
    self2_self2: Tensor
    """Σ s22², (L2,)."""
    estimates: Tensor
    """How many batches were summed, 0-d, on the same device so that ranks can add it up too."""


def of_batch(cross: Tensor, self1: Tensor, self2: Tensor) -> Sums:
    """Sums of one batch: s12 (L1, L2), s11 (L1,) and s22 (L2,)."""
    return Sums(
        cross=cross,
        self1=self1,
        self2=self2,
        cross_cross=cross * cross,
        cross_self1=cross * self1[:, None],
        cross_self2=cross * self2[None, :],
        self1_self1=self1 * self1,
        self1_self2=self1[:, None] * self2[None, :],
        self2_self2=self2 * self2,
        estimates=torch.ones((), dtype=cross.dtype, device=cross.device),
    )


def empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Sums:
    """Sums of no batch at all, for L1 rows and L2 columns."""
    zeros = torch.zeros(rows, columns, dtype=dtype, device=device)
    nothing = of_batch(zeros, zeros[:, 0], zeros[0])
    return replace(nothing, estimates=torch.zeros_like(nothing.estimates))


def merge(left: Sums, right: Sums) -> Sums:
    """Sums of both, of the same layers."""
    return Sums(*(a + b for a, b in zip(_values(left), _values(right), strict=True)))


def pick(sums: Sums, rows: Tensor, columns: Tensor) -> Sums:
    """Sums of some rows (R,) and columns (C,) only, repeated ones included."""
    return Sums(
        cross=sums.cross[rows][:, columns],
        self1=sums.self1[rows],
        self2=sums.self2[columns],
        cross_cross=sums.cross_cross[rows][:, columns],
        cross_self1=sums.cross_self1[rows][:, columns],
        cross_self2=sums.cross_self2[rows][:, columns],
        self1_self1=sums.self1_self1[rows],
        self1_self2=sums.self1_self2[rows][:, columns],
        self2_self2=sums.self2_self2[columns],
        estimates=sums.estimates,
    )


def compute(sums: Sums) -> tuple[Tensor, Tensor]:
    """CKA and its standard error over batches, both (L1, L2).

    CKA is Σs12 / √(Σs11 Σs22), without clamp or epsilon: an unbiased estimate may well be
    negative, and 0/0 is NaN.

    The standard error is the infinitesimal jackknife (Jaeckel 1972; Efron 1982, ch. 6), the
    delete-one-batch jackknife to first order: batch b moves CKA by
    ``d_b = s12_b/√(Σs11 Σs22) - CKA/2 (s11_b/Σs11 + s22_b/Σs22)``, Σd_b = 0, and the error is
    √(B/(B-1) Σd_b²). The square multiplied out needs only the sums kept here, so that memory does
    not grow with the batches. NaN for fewer than two batches.
    """
    scale = (sums.self1[:, None] * sums.self2[None, :]).sqrt()
    cka = sums.cross / scale
    one, two = sums.self1[:, None], sums.self2[None, :]
    squares = (
        sums.cross_cross / scale**2
        - cka / scale * (sums.cross_self1 / one + sums.cross_self2 / two)
        + cka**2
        / 4
        * (
            sums.self1_self1[:, None] / one**2
            + 2 * sums.self1_self2 / (one * two)
            + sums.self2_self2[None, :] / two**2
        )
    )
    # Rounding may leave a sum of squares just below 0 where all batches agree (the diagonal).
    variance = squares.clamp(min=0) * sums.estimates / (sums.estimates - 1)
    return cka, torch.where(sums.estimates > 1, variance.sqrt(), torch.full_like(cka, torch.nan))


def flatten(sums: Sums) -> Tensor:
    """Every sum in one vector, which is what ranks add up."""
    return torch.cat([value.reshape(-1) for value in _values(sums)])


def unflatten(vector: Tensor, like: Sums) -> Sums:
    """The inverse of :func:`flatten`, with the shapes of ``like``."""
    shapes = [value.shape for value in _values(like)]
    parts = vector.split([shape.numel() for shape in shapes])
    return Sums(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))


def _values(sums: Sums) -> list[Tensor]:
    # Not dataclasses.astuple, which would copy every tensor.
    return [getattr(sums, field.name) for field in fields(Sums)]
