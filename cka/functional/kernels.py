"""Kernels: functions from (n, p) features to the (n, n) Gram matrix of their samples.

CKA does not change if features are multiplied by a number, but their squares may leave the range of
the dtype: 1e-25 has no square in float32, and 1e160 none in float64. Such features are multiplied
by a power of two first, which is exact.

The linear and RBF kernels first shift features to near their centre. The shift changes neither CKA,
for which :mod:`cka.functional` later centres exactly in float64, nor a distance. Without it, a
common offset of 1000 would cost every digit of a float32 Gram matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from cka import functional
from cka.errors import InputError, SettingError
from cka.functional import gram_dtype, real_float, sum_dtype

Kernel: TypeAlias = Callable[[Tensor], Tensor]
Block: TypeAlias = tuple[int, int]

# A shifted chunk of this size stays in a core's level-2 cache between its three uses. Its memory
# adds to the peak of the forward pass, but is small compared with a network's activations.
_CPU_CHUNK_BYTES = 512 * 1024
# Wider features are split into at most this many chunks.
_CPU_CHUNKS = 64
# An accelerator is fastest with few, large operations. An eighth of the features takes less memory
# than the forward pass itself, because a layer's input is still live when its hook runs.
_ACCELERATOR_CHUNKS = 8
_MIN_COLUMNS = 128
_BLOCK_SAMPLES = 96
# The shift need not be exact: the mean of 8 samples is on average an eighth of a variance away from
# the mean of all samples.
_SAMPLES_FOR_CENTRE = 8
# Largest entries between 2**-60 and 2**60 are in range, also in sums of their fourth powers, and
# features between 2**-40 and 2**40 have such entries for any width.
_GRAM_EXPONENT = 60
_FEATURE_EXPONENT = 40
# The exponent of a matrix that is zero: lower than any other, so that it never sets the scale.
ZERO_EXPONENT = -(10**6)
# The longest sum in float32; sums over pieces of this width are added in float64.
_PIECE_COLUMNS = 16384
# At this width of an RBF kernel, samples at the median distance have a similarity of 4e-6.
_NARROW = 0.2


def linear_gram(rows: Tensor) -> Tensor:
    """Return the Gram matrix (n, n) of (n, p) rows, shifted to near their centre.

    Columns are shifted, widened from half precision, and multiplied in chunks, so that the features
    are never copied as a whole. Differentiable.
    """
    gram = functional.gram(rows, _SAMPLES_FOR_CENTRE)
    return gram if gram is not None else _gram_by_torch(rows)


def scaled_gram(
    kernel: Kernel, rows: Tensor, *, check: bool = True, unbiased: bool = False
) -> tuple[Tensor, int]:
    """Return a matrix K and an exponent e: the kernel's Gram matrix of (n, p) rows is K * 2**e.

    The exponent is 0 unless the matrix, or its fourth power in sums of HSIC, would leave the range
    of the dtype. It is ``ZERO_EXPONENT`` if all features are zero, and 0 for an RBF kernel, which
    does not depend on the scale of its features, unless it is so narrow that most similarities
    would be 0. A product with a power of two is exact, barring
    underflow (Higham 2002, "Accuracy and Stability of Numerical Algorithms", ch. 2).

    Args:
        kernel: a kernel from :func:`resolve_kernel`.
        rows: features (n, p).
        check: False skips the check of the range, which would wait for an accelerator.
        unbiased: whether the matrix is for the unbiased estimate, for which the diagonal does not
            count. That of a narrow RBF kernel is then another one.
    """
    if isinstance(kernel, RBF):
        if unbiased and kernel.threshold < _NARROW:
            return kernel.without_diagonal(rows)
        return kernel.centred(rows), 0
    if not check:
        return kernel(rows), 0
    if kernel is linear_gram:
        return _scaled_linear_gram(rows)
    gram = kernel(rows)
    return _scaled_matrix(gram) if isinstance(kernel, _UserKernel) else (gram, 0)


def _scaled_linear_gram(rows: Tensor) -> tuple[Tensor, int]:
    gram = linear_gram(rows)
    if type(gram) is not Tensor or _in_range(gram.detach().diagonal(), _GRAM_EXPONENT):
        return gram, 0  # the largest entry is on the diagonal; a fake tensor has no values
    wide = rows.detach().to(gram.dtype)
    largest = _largest(wide)
    if largest == 0:
        return gram, ZERO_EXPONENT
    if not math.isfinite(largest) or _in_range(wide, _FEATURE_EXPONENT):
        return gram, 0
    exponent = _exponent_to_one(largest, gram.dtype)
    return linear_gram(rows.to(gram.dtype) * 2.0**exponent), -2 * exponent


def _scaled_matrix(gram: Tensor) -> tuple[Tensor, int]:
    """Return a user's matrix with a largest entry near 1 if it is not in range."""
    if type(gram) is not Tensor or _in_range(gram.detach(), 2 * _GRAM_EXPONENT):
        return gram, 0
    largest = _largest(gram.detach())
    if largest == 0 or not math.isfinite(largest):
        return gram, ZERO_EXPONENT if largest == 0 else 0
    exponent = _exponent_to_one(largest, gram.dtype)
    return gram * 2.0**exponent, -exponent


def _exponent_to_one(largest: float, dtype: torch.dtype) -> int:
    """Return e for which ``largest * 2**e`` is near 1, and 2**e is in the range of the dtype."""
    limit = 126 if dtype == torch.float32 else 1022
    return max(-limit, min(limit, 1 - math.frexp(largest)[1]))


def _largest(values: Tensor) -> float:
    """Return the largest absolute value; 0 if there is none."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)  # unlike abs(), without a copy
    return max(-low.item(), high.item()) if not low.isnan() else math.nan


def _in_range(values: Tensor, exponent: int) -> bool:
    """Whether the largest absolute value is between 2**-exponent and 2**exponent."""
    return 2.0**-exponent <= _largest(values) <= 2.0**exponent


def _gram_by_torch(rows: Tensor) -> Tensor:
    """Return the same matrix by operators of torch: any device, any dtype, differentiable."""
    dtype = gram_dtype(rows.dtype)
    centre = _centre(rows, dtype)
    width = _columns_per_chunk(rows, dtype)
    blocks = _blocks(rows)

    def product(columns: slice) -> Tensor:
        gram = torch.zeros(rows.shape[0], rows.shape[0], dtype=dtype, device=rows.device)
        for part in _slices(columns, width):
            # Half precision minus float32 is float32, so one copy both shifts and widens. It has
            # no name, so it is freed before the next one is allocated.
            _add_upper_product(gram, rows[:, part] - centre[part], blocks)
        return gram

    # Long sums in float32 lose digits: with one sum over all columns, the error of CKA of a ResNet
    # at 224 x 224 pixels and 16 images was 5e-6.
    whole = slice(0, max(1, rows.shape[1]))
    first, *others = _slices(whole, max(width, _PIECE_COLUMNS))
    total = product(first)
    for part in others:
        total = total.to(sum_dtype(total.device))
        total += product(part)
    return _mirrored(total.to(dtype), blocks)


def _slices(whole: slice, width: int) -> Iterator[slice]:
    """Split a slice into slices of at most ``width``."""
    starts = range(whole.start, whole.stop, width)
    return (slice(start, min(start + width, whole.stop)) for start in starts)


def _add_upper_product(gram: Tensor, rows: Tensor, blocks: Sequence[Block]) -> None:
    """Add ``rows @ rows.T`` to the blocks of ``gram`` on and above the diagonal."""
    if len(blocks) == 1:
        gram.addmm_(rows, rows.T)
        return
    for start, end in blocks:
        gram[start:end, start:].addmm_(rows[start:end], rows[start:].T)


def _centre(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean (p,) of the first samples of (n, p) rows."""
    first = rows[:_SAMPLES_FOR_CENTRE]
    if rows.dtype != dtype:
        return first.mean(0, dtype=dtype)
    # A matrix-vector product takes a third of the time of a mean over so few rows.
    return first.T @ first.new_full(first.shape[:1], 1 / first.shape[0])


def _mirrored(gram: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Copy the blocks above the diagonal to those below it, and return the matrix."""
    for start, end in blocks[:-1]:
        gram[end:, start:end] = gram[start:end, end:].T
    return gram


def _blocks(rows: Tensor) -> list[Block]:
    """Return start and end row of each block: several on a CPU if n ≥ 192, else one.

    At n = 512, blocks save two fifths of the arithmetic. At n = 64 they would be slower than the
    whole product, and on an accelerator a launch costs more than the arithmetic saved.
    """
    samples = rows.shape[0]
    several = rows.device.type == "cpu" and samples >= 2 * _BLOCK_SAMPLES
    size = _BLOCK_SAMPLES if several else samples
    return [(start, min(start + size, samples)) for start in range(0, samples, size)]


def _columns_per_chunk(rows: Tensor, dtype: torch.dtype) -> int:
    samples, columns = rows.shape
    if rows.device.type == "cpu":
        wanted = max(_CPU_CHUNK_BYTES // (samples * dtype.itemsize), columns // _CPU_CHUNKS)
    else:
        wanted = -(-columns // _ACCELERATOR_CHUNKS)
    # Rows that are a power of two apart would compete for the same cache lines.
    return max(_MIN_COLUMNS, wanted) + 16


@dataclass(frozen=True)
class RBF:
    """Gaussian kernel exp(-D² / (2 t² median(D²))) of squared distances D².

    >>> from cka import cka_from_features
    >>> x = torch.randn(64, 8)
    >>> print(f"{cka_from_features(x, x, kernel=RBF(threshold=0.5)):.4f}")
    1.0000

    The median is taken over the whole (n, n) matrix of squared distances including its zero
    diagonal, as in Google's CKA demo (Kornblith et al. 2019).

    Raises:
        SettingError: if the threshold is not a positive number.
    """

    threshold: float = 1.0
    """Width t of the kernel, in units of the square root of the median squared distance."""

    def __post_init__(self) -> None:
        """Check that the threshold is a positive number."""
        if not self.threshold > 0:
            raise SettingError(
                f"RBF needs a threshold above 0, got {self.threshold!r}; write e.g. RBF(0.5)"
            )

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the Gram matrix (n, n) of (n, p) rows."""
        return torch.exp(-self._exponents(rows) / (2 * self.threshold**2))

    def centred(self, rows: Tensor) -> Tensor:
        """Return a matrix (n, n) with the same CKA, of which wide kernels keep the digits.

        With a wide kernel all similarities are near 1, and float32 would keep few digits of what
        they differ by. HSIC does not change if a constant is added to a matrix, nor CKA if the
        matrices of all batches are multiplied by a number: this is (K - 1) 2t² for t > 1.

        Args:
            rows: features (n, p).

        Returns:
            A matrix (n, n); which one depends on the threshold.
        """
        factor = 2 * self.threshold**2
        if self.threshold <= 1:  # similarities near 0 keep their digits in K itself
            return self(rows)
        exponents = self._exponents(rows)
        # 1 - exp(-x) = x to the last digit of float64 for x below 2**-60.
        if factor > 2.0**70:
            return -exponents
        return torch.expm1(-exponents / factor) * factor

    def without_diagonal(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return a matrix K (n, n) and an exponent e: beside the diagonal, similarities are K 2**e.

        Beside the diagonal, which is 1, the similarities of a narrow kernel would be lost in sums,
        and would underflow. The largest one in K is between 1 and 2 instead, and the diagonal is as
        large, so that a matrix with equal entries remains one. In float64, because the kernel
        multiplies rounding errors of distances.

        Args:
            rows: features (n, p).

        Returns:
            K, (n, n) in float64, and e, a whole number.
        """
        exponents = self._exponents(rows.to(sum_dtype(rows.device))) / (2 * self.threshold**2)
        exponents = exponents.fill_diagonal_(math.inf)
        least = float(exponents.detach().min())
        # Not finite if features are NaN, or there is no other sample.
        shift = math.ceil(least / math.log(2)) if math.isfinite(least) else 0
        gram = torch.exp(shift * math.log(2) - exponents)
        return gram.fill_diagonal_(float(gram.detach().max())), -shift

    def _exponents(self, rows: Tensor) -> Tensor:
        """Return squared distances (n, n) in units of their median."""
        distances = squared_distances(_scaled_linear_gram(rows)[0])
        # If the median is 0, equal samples have similarity 1 and others 0; 0 / 0 would be NaN.
        return torch.where(distances == 0, distances, distances / _median(distances))


def squared_distances(gram: Tensor) -> Tensor:
    """Return squared Euclidean distances (n, n) between samples, from their linear Gram matrix."""
    norms = gram.diagonal()
    distances = (norms[:, None] + norms[None, :] - 2 * gram).clamp(min=0)
    return distances.masked_fill(torch.eye(len(gram), dtype=torch.bool, device=gram.device), 0)


def _median(values: Tensor) -> Tensor:
    """Return the mean of the two middle values, as NumPy does; torch.median takes the lower."""
    ordered = values.flatten().sort().values
    count = ordered.numel()
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def resolve_kernel(kernel: str | Kernel) -> Kernel:
    """Return the kernel with this name, or a user's function with its result checked.

    Raises:
        SettingError: if ``kernel`` is neither ``"linear"``, ``"rbf"`` nor callable.
    """
    if kernel == "linear":
        return linear_gram
    if kernel == "rbf":
        return RBF()
    if isinstance(kernel, RBF):
        return kernel
    if callable(kernel):
        return _UserKernel(kernel)
    raise SettingError(
        f"cannot use {kernel!r} as a kernel; write 'linear', 'rbf', RBF(threshold=0.5) "
        "or a function from (n, p) features to an (n, n) Gram matrix"
    )


def kernel_name(kernel: str | Kernel) -> str:
    """Return the name under which a result shows a kernel: for a function, that of the function."""
    return kernel if isinstance(kernel, str) else getattr(kernel, "__name__", None) or repr(kernel)


def check_linear(kernel: Kernel) -> None:
    """Check that a kernel is the linear one, which "sampled_neurons" requires.

    Raises:
        SettingError: if it is not.
    """
    if kernel is not linear_gram:
        raise SettingError(
            f"estimator='sampled_neurons' requires kernel='linear', got kernel={kernel!r}; omit "
            "kernel=, or use estimator='unbiased'"
        )


@dataclass(frozen=True)
class _UserKernel:
    """A user's function, which gets float32 or float64 features and must return a Gram matrix."""

    function: Kernel

    def __call__(self, rows: Tensor) -> Tensor:
        gram = self.function(rows.to(gram_dtype(rows.dtype)))
        expected = (rows.shape[0], rows.shape[0])
        if not isinstance(gram, Tensor) or tuple(gram.shape) != expected:
            returned = tuple(gram.shape) if isinstance(gram, Tensor) else type(gram).__name__
            raise InputError(
                f"the kernel must map features {tuple(rows.shape)} to a Gram matrix {expected}, "
                f"but it returned {returned}; write e.g. lambda x: x @ x.T"
            )
        return real_float(gram)
