"""Gram matrices: (n, p) features in, (n, n) similarities of samples out.

Linear and RBF kernels shift features to near their centre first. It changes neither CKA, which
centres exactly and in float64 later (:mod:`cka.functional.hsic`), nor a distance, but it is what
keeps float32 right: a common offset of 1000 would eat every digit of the Gram matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from cka.errors import InputError, SettingError
from cka.functional import native
from cka.functional.precision import gram_dtype, sum_dtype

Kernel: TypeAlias = Callable[[Tensor], Tensor]
Block: TypeAlias = tuple[int, int]

# A shifted chunk this size stays in a core's level-2 cache between its three uses, and is small
# beside the activations of any network worth comparing: it comes on top of the forward's peak.
_CPU_CHUNK_BYTES = 512 * 1024
_CPU_SHARE = 64
# An accelerator wants few, large kernels; an eighth of the features stays below what the forward
# itself holds on top of them (a layer's input and output are both alive when its hook runs).
_ACCELERATOR_SHARE = 8
_FEWEST_COLUMNS = 128
_BLOCK_SAMPLES = 96
# A centre need not be exact, only near: that of 8 samples is, in the mean, an eighth of a variance
# away from that of all, and takes an eighth of the time of finding it.
_SAMPLES_FOR_CENTRE = 8
# The longest sum in float32; the sums of pieces this wide are added up in float64.
_PIECE_COLUMNS = 16384


def as_rows(features: Tensor) -> Tensor:
    """View (n, ...) features as (n, p), without a copy wherever the layout allows.

    The columns come in memory order: a Gram matrix does not depend on their order, and
    flattening a channels-last image in its logical order would copy all of it.
    """
    if features.dtype == torch.bool:
        features = features.to(torch.uint8)  # booleans cannot be subtracted from
    if features.is_complex():
        features = torch.view_as_real(features)  # Re<x, y>, the real inner product
    if features.ndim == 1:
        return features.unsqueeze(1)
    if features.is_contiguous():
        return features.flatten(1)
    strides = features.stride()
    inner = sorted(range(1, features.ndim), key=lambda dim: -strides[dim])
    return features.permute(0, *inner).reshape(features.shape[0], -1)


def flattened(features: Tensor, kernel: Kernel) -> Tensor:
    """Features (n, ...) as the (n, p) a kernel gets; a user's own sees its columns in order."""
    if kernel is linear_gram or isinstance(kernel, RBF):
        return as_rows(features)
    return features.reshape(features.shape[0], -1)


def linear_gram(rows: Tensor) -> Tensor:
    """Gram matrix (n, n) of (n, p) rows, each column less the mean of its first samples.

    Chunks of columns are shifted and multiplied one by one, so that no shifted copy of the features
    ever exists. Differentiable. Half precision is widened chunk by chunk.
    """
    gram = native.gram(rows, _SAMPLES_FOR_CENTRE)
    return gram if gram is not None else _gram_by_torch(rows)


def _gram_by_torch(rows: Tensor) -> Tensor:
    """The same by operators of torch: on any device, in any dtype, with a derivative."""
    dtype = gram_dtype(rows.dtype)
    centre = _centre(rows, dtype)
    width = _columns_per_chunk(rows, dtype)
    blocks = _blocks(rows)

    def product(piece: slice) -> Tensor:
        gram = torch.zeros(rows.shape[0], rows.shape[0], dtype=dtype, device=rows.device)
        for part in _parts(piece, width):
            # The difference of half precision and float32 is float32, without another copy, and no
            # name keeps it alive while the next one is made.
            _add_upper_product(gram, rows[:, part] - centre[part], blocks)
        return gram

    # A sum in the features' own dtype is fine if it is not long. One for all would cost a digit
    # where features are wide: CKA of ResNets at 224 x 224 pixels and 16 images was 5e-6 off.
    whole = slice(0, max(1, rows.shape[1]))
    first, *others = _parts(whole, max(width, _PIECE_COLUMNS))
    total = product(first)
    for piece in others:
        total = total.to(sum_dtype(total.device))
        total += product(piece)
    return _mirrored(total.to(dtype), blocks)


def _parts(whole: slice, width: int) -> Iterator[slice]:
    starts = range(whole.start, whole.stop, width)
    return (slice(start, min(start + width, whole.stop)) for start in starts)


def _add_upper_product(gram: Tensor, rows: Tensor, blocks: Sequence[Block]) -> None:
    """Add ``rows @ rows.T``, of several blocks only those on and above the diagonal."""
    if len(blocks) == 1:
        gram.addmm_(rows, rows.T)
        return
    for start, end in blocks:
        gram[start:end, start:].addmm_(rows[start:end], rows[start:].T)


def _centre(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean (p,) of the first samples of (n, p) rows."""
    first = rows[:_SAMPLES_FOR_CENTRE]
    if rows.dtype != dtype:
        return first.mean(0, dtype=dtype)
    # A product with a vector takes a third of the time of a mean over so few.
    return first.T @ first.new_full(first.shape[:1], 1 / first.shape[0])


def _mirrored(gram: Tensor, blocks: Sequence[Block]) -> Tensor:
    """The matrix with the blocks below the diagonal filled in."""
    for start, end in blocks[:-1]:
        gram[end:, start:end] = gram[start:end, end:].T
    return gram


def _blocks(rows: Tensor) -> list[Block]:
    """Rows of each block: several on a CPU from n = 192 on, else one.

    At n = 512 that saves two fifths of the arithmetic; at n = 64 smaller blocks would be slower
    than the whole product, and on an accelerator a launch costs more than the arithmetic.
    """
    samples = rows.shape[0]
    several = rows.device.type == "cpu" and samples >= 2 * _BLOCK_SAMPLES
    size = _BLOCK_SAMPLES if several else samples
    return [(start, min(start + size, samples)) for start in range(0, samples, size)]


def _columns_per_chunk(rows: Tensor, dtype: torch.dtype) -> int:
    samples, columns = rows.shape
    if rows.device.type == "cpu":
        wanted = max(_CPU_CHUNK_BYTES // (samples * dtype.itemsize), columns // _CPU_SHARE)
    else:
        wanted = -(-columns // _ACCELERATOR_SHARE)
    # Rows a power of two apart would compete for the same cache lines.
    return max(_FEWEST_COLUMNS, wanted) + 16


@dataclass(frozen=True)
class RBF:
    """Gaussian kernel exp(-D² / (2 t² median(D²))) over squared distances D².

    The median is taken over the whole (n, n) matrix of squared distances, its zero diagonal
    included, as Google's CKA demo does (18.302 there, against 18.387 without the diagonal).
    """

    threshold: float = 1.0
    """Width t of the kernel, in units of the root of the median squared distance."""

    def __post_init__(self) -> None:
        """Refuse a width that is no positive number."""
        if not self.threshold > 0:
            raise SettingError(
                f"RBF needs a threshold above 0, got {self.threshold!r}; write e.g. RBF(0.5)"
            )

    def __call__(self, rows: Tensor) -> Tensor:
        """Gram matrix (n, n) of (n, p) rows."""
        distances = squared_distances(rows)
        width = 2 * self.threshold**2 * _median(distances)
        # 0 / 0 where more than half of the distances vanish: equal samples stay fully similar.
        return torch.exp(-torch.where(distances == 0, distances, distances / width))


def squared_distances(rows: Tensor) -> Tensor:
    """Squared Euclidean distances (n, n) between (n, p) rows, from their Gram matrix."""
    gram = linear_gram(rows)
    norms = gram.diagonal()
    distances = (norms[:, None] + norms[None, :] - 2 * gram).clamp(min=0)
    return distances.masked_fill(torch.eye(len(gram), dtype=torch.bool, device=gram.device), 0)


def _median(values: Tensor) -> Tensor:
    """Median as NumPy has it: the mean of the two middle values (torch.median takes the lower)."""
    ordered = values.flatten().sort().values
    count = ordered.numel()
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def resolve_kernel(kernel: str | Kernel) -> Kernel:
    """Kernel function behind a name; functions of the user's are checked at every call.

    Raises:
        SettingError: for a name that is neither ``"linear"`` nor ``"rbf"``.
    """
    if kernel == "linear":
        return linear_gram
    if kernel == "rbf":
        return RBF()
    if isinstance(kernel, RBF):
        return kernel
    if callable(kernel):
        return _Checked(kernel)
    raise SettingError(
        f"cannot use {kernel!r} as a kernel; write 'linear', 'rbf', RBF(threshold=0.5) "
        "or a function from (n, p) features to an (n, n) Gram matrix"
    )


@dataclass(frozen=True)
class _Checked:
    """A user's kernel: gets features wide enough, and must give a Gram matrix."""

    function: Kernel

    def __call__(self, rows: Tensor) -> Tensor:
        gram = self.function(rows.to(gram_dtype(rows.dtype)))
        expected = (rows.shape[0], rows.shape[0])
        if not isinstance(gram, Tensor) or tuple(gram.shape) != expected:
            given = tuple(gram.shape) if isinstance(gram, Tensor) else type(gram).__name__
            raise InputError(
                f"the kernel must map features {tuple(rows.shape)} to a Gram matrix {expected}, "
                f"it gave {given}"
            )
        return gram
