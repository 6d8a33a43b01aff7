"""Sums of HSIC terms over batches, and CKA with its standard error from these sums.

Nguyen et al. 2020, eq. 2: HSIC is summed over batches first, and the ratio is taken of the sums.
Every field is a plain sum, so batches, parts of batches and ranks are added in the same way. Sums
of matrices with different exponents are first multiplied by powers of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

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
    """Number of batches, a 0-d tensor on the same device, so that it is added over ranks too."""
    exponents: Exponents | None = None
    """Exponents e (L1) and f (L2) of the Gram matrices; None if all are 0. The true Σ s12 is
    Σ s12 2**(e + f), and so on. They cancel in CKA, and matter only when sums are added."""


Exponents: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def batch_sums(
    cross: Tensor, self1: Tensor, self2: Tensor, exponents: Exponents | None = None
) -> Sums:
    """Return the sums of one batch.

    Args:
        cross: HSIC s12 of every pair, (L1, L2).
        self1: HSIC s11 of each row's matrix with itself, (L1,).
        self2: HSIC s22 of each column's matrix with itself, (L2,).
        exponents: those of the Gram matrices; None if all are 0.
    """
    return Sums(
        exponents=exponents if exponents and any(map(any, exponents)) else None,
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


def zero_sums(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Sums:
    """Return the sums of no batches, for L1 rows and L2 columns."""
    zeros = torch.zeros(rows, columns, dtype=dtype, device=device)
    sums = batch_sums(zeros, zeros[:, 0], zeros[0])
    return replace(sums, estimates=torch.zeros_like(sums.estimates))


def merge_sums(left: Sums, right: Sums) -> Sums:
    """Add two sums of the same layers."""
    exponents = highest_exponents([left.exponents, right.exponents])
    left, right = with_exponents(left, exponents), with_exponents(right, exponents)
    added = (a + b for a, b in zip(_values(left), _values(right), strict=True))
    return _sums_of(added, exponents)


def highest_exponents(several: Sequence[Exponents | None]) -> Exponents | None:
    """Return the highest exponent of each layer, for sums that are added up.

    Args:
        several: exponents of the same layers; None stands for zeros.

    Returns:
        The highest ones, or None if all of ``several`` are None.
    """
    known = [exponents for exponents in several if exponents is not None]
    if not known:
        return None
    if len(known) < len(several):
        known.append(((0,) * len(known[0][0]), (0,) * len(known[0][1])))
    first, second = (tuple(map(max, zip(*side, strict=True))) for side in zip(*known, strict=True))
    return first, second


def with_exponents(sums: Sums, exponents: Exponents | None) -> Sums:
    """Return the same sums with other exponents.

    Args:
        sums: the sums.
        exponents: none is lower than before, so that no sum overflows; None leaves the sums as
            they are.
    """
    if exponents is None or exponents == sums.exponents:
        return sums
    before = sums.exponents or ((0,) * len(sums.self1), (0,) * len(sums.self2))
    of_rows, of_columns = (
        powers(*side, like=sums.cross) for side in zip(before, exponents, strict=True)
    )
    rows, columns = of_rows[:, None], of_columns[None, :]
    return Sums(
        cross=sums.cross * rows * columns,
        self1=sums.self1 * of_rows**2,
        self2=sums.self2 * of_columns**2,
        cross_cross=sums.cross_cross * rows**2 * columns**2,
        cross_self1=sums.cross_self1 * rows**3 * columns,
        cross_self2=sums.cross_self2 * rows * columns**3,
        self1_self1=sums.self1_self1 * of_rows**4,
        self1_self2=sums.self1_self2 * rows**2 * columns**2,
        self2_self2=sums.self2_self2 * of_columns**4,
        estimates=sums.estimates,
        exponents=exponents,
    )


def powers(before: Sequence[int], after: Sequence[int], *, like: Tensor) -> Tensor:
    """Return 2**(before - after) for each layer, (L,); 0 if that is below the range of float64.

    Args:
        before: exponents of L layers.
        after: exponents of the same layers.
        like: a tensor with the dtype and the device of the result.
    """
    powers = [2.0 ** max(e - f, -1100) for e, f in zip(before, after, strict=True)]
    return torch.tensor(powers, dtype=torch.float64, device="cpu").to(like.dtype).to(like.device)


def select_sums(sums: Sums, rows: Tensor, columns: Tensor) -> Sums:
    """Return the sums of some rows and columns.

    Args:
        sums: the sums of L1 rows and L2 columns.
        rows: indices of rows, (R,), on the device of the sums; an index may occur several times.
        columns: indices of columns, (C,).
    """
    exponents = None
    if sums.exponents is not None:
        of_rows, of_columns = sums.exponents
        exponents = (
            tuple(of_rows[position] for position in rows.tolist()),
            tuple(of_columns[position] for position in columns.tolist()),
        )
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
        exponents=exponents,
    )


def cka_with_error(sums: Sums) -> tuple[Tensor, Tensor]:
    """Return CKA and its standard error over batches, both (L1, L2).

    CKA is Σs12 / √(Σs11 Σs22), without clamp or epsilon: an unbiased estimate may be negative,
    and 0/0 is NaN.

    The standard error is the infinitesimal jackknife (Jaeckel 1972; Efron 1982, ch. 6), the
    first-order form of the delete-one-batch jackknife: the influence of batch b on CKA is
    ``d_b = s12_b/√(Σs11 Σs22) - CKA/2 (s11_b/Σs11 + s22_b/Σs22)`` with Σd_b = 0, and the error is
    √(B/(B-1) Σd_b²). The expanded square needs only the sums in :class:`Sums`, so memory does not
    grow with the number of batches. The error is NaN for fewer than two batches.
    """
    scale = cka_scale(sums)
    cka = sums.cross / scale
    self1, self2 = sums.self1[:, None], sums.self2[None, :]
    squares = (
        sums.cross_cross / scale**2
        - cka / scale * (sums.cross_self1 / self1 + sums.cross_self2 / self2)
        + cka**2
        / 4
        * (
            sums.self1_self1[:, None] / self1**2
            + 2 * sums.self1_self2 / (self1 * self2)
            + sums.self2_self2[None, :] / self2**2
        )
    )
    # If all batches agree, as on the diagonal, rounding may give a sum of squares just below 0.
    variance = squares.clamp(min=0) * sums.estimates / (sums.estimates - 1)
    return cka, torch.where(sums.estimates > 1, variance.sqrt(), torch.full_like(cka, torch.nan))


def cka_scale(sums: Sums) -> Tensor:
    """Return √(Σs11 Σs22), (L1, L2), by which Σs12 is divided; NaN if a factor is negative."""
    return root_of_product(sums.self1[:, None], sums.self2[None, :])


def root_of_product(self1: Tensor, self2: Tensor) -> Tensor:
    """Return √(s11 s22) of HSIC terms of any shapes that broadcast; NaN if a factor is negative."""
    # Two negative factors have a positive product.
    return (self1 * self2).sqrt().masked_fill((self1 < 0) | (self2 < 0), torch.nan)


def sums_on_cpu(sums: Sums) -> Sums:
    """Return copies of sums in float64 on the CPU.

    Args:
        sums: the sums.
    """
    # In one vector, because each tensor of its own would be one more object to keep.
    vector = sums_to_vector(sums).detach().to("cpu", torch.float64)
    return vector_to_sums(vector, sums)


def sums_to_vector(sums: Sums) -> Tensor:
    """Concatenate all sums in one vector, which can be added over ranks in one call."""
    return torch.cat([value.reshape(-1) for value in _values(sums)])


def vector_to_sums(vector: Tensor, like: Sums) -> Sums:
    """Undo :func:`sums_to_vector`, with the shapes and exponents of ``like``."""
    shapes = [value.shape for value in _values(like)]
    parts = vector.split([shape.numel() for shape in shapes])
    values = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return _sums_of(values, like.exponents)


def _values(sums: Sums) -> list[Tensor]:
    """Return the tensors, in the order of the fields."""
    # dataclasses.astuple would copy every tensor.
    return [getattr(sums, name) for name in _TENSORS]


def _sums_of(values: Iterable[Tensor], exponents: Exponents | None) -> Sums:
    """Undo :func:`_values`."""
    return Sums(**dict(zip(_TENSORS, values, strict=True)), exponents=exponents)


_TENSORS = [field.name for field in fields(Sums) if field.name != "exponents"]
