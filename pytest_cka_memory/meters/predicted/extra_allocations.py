"""What CUDA's operators allocate beyond the results that the shape rules of fake tensors give.

Only what was found by comparison with torch's CUDA build is here: losses, ``logsumexp``, ``cdist``
and matrix products. What remains is in docs/explanation/trust.md.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

_KEEP_UNREDUCED = frozenset(
    f"aten::{name}"
    for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
"""They compute the unreduced loss in the storage of their result, a scalar, and never shrink it."""
_UNREDUCED_TEMPORARIES = {
    "aten::mse_loss": 1,
    "aten::smooth_l1_loss": 1,
    "aten::huber_loss": 1,
    "aten::binary_cross_entropy_with_logits": 2,
}
"""How many tensors of the size of the unreduced loss they allocate and free again."""
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))


def keep_unreduced(operator: str, args: Sequence[Any], result: Any) -> None:
    """Enlarge the storage of a reduced loss to what the operator leaves it at, on any device."""
    if operator in _KEEP_UNREDUCED and _is_reduced(args, result):
        result.untyped_storage().resize_(_unreduced_bytes(args, result))


def temporaries(operator: str, args: Sequence[Any], result: Any) -> list[int]:
    """Return the bytes of each tensor that an operator allocates and frees before it returns."""
    if operator in _UNREDUCED_TEMPORARIES and _is_reduced(args, result):
        return [_unreduced_bytes(args, result)] * _UNREDUCED_TEMPORARIES[operator]
    if operator == "aten::_euclidean_dist":  # appends the norms and ones to the rows
        return [prod(rows.shape[:-1]) * (rows.shape[-1] + 2) * rows.itemsize for rows in args]
    if operator == "aten::logsumexp":
        return [result.nbytes, args[0].nbytes]
    if operator in _PRODUCTS:
        return [matrix.nbytes for matrix in args[-2:] if not _is_readable_by_cublas(matrix)]
    return []


def _is_reduced(args: Sequence[Any], result: Any) -> bool:
    return result.dim() == 0 and _unreduced_numel(args) > 1


def _unreduced_bytes(args: Sequence[Any], result: torch.Tensor) -> int:
    return _unreduced_numel(args) * result.dtype.itemsize


def _unreduced_numel(args: Sequence[Any]) -> int:
    values, target = args[:2]
    return prod(torch.broadcast_shapes(values.shape, target.shape))


def _is_readable_by_cublas(matrix: torch.Tensor) -> bool:
    """Whether a product takes these strides without a copy (``prepare_matrix_for_cublas``)."""
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))
