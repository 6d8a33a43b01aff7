"""Functions from feature matrices to CKA: kernels, HSIC, sums over batches.

This module itself has the Hilbert-Schmidt Independence Criterion (HSIC) of Gram matrices, and how
all of these functions multiply matrices: in which dtypes, in full float32 precision, and by
``_gram.c``.

HSIC, unbiased: Song et al. 2012, in the U-centred form of Székely & Rizzo 2014 (eq. 2.1), which has
the same value and avoids cancellation. Biased: Gretton et al. 2005, tr(KHLH) / (n-1)².

The extension ``_gram.c`` computes Gram matrices of float32 features on a CPU three times as fast as
torch. It is compiled when the package is installed, if a compiler is available. :func:`gram`
returns None if it was not compiled, if the processor has no vectors that it supports, if torch was
not built with GNU's OpenMP, or if the environment variable ``CKA_NATIVE`` is 0.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cka.errors import InputError, SettingError


def gram_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the Gram matrix of features: float64 for float64, else float32.

    Half precision overflows in a Gram matrix: 256 features of value 16 exceed 65504.
    """
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of HSIC sums: float64, or float32 if the device has no float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def real_float(gram: Tensor) -> Tensor:
    """Return a Gram matrix in float32 or float64: the dtypes in which it can be centred.

    Raises:
        InputError: if its values are complex, or cannot be read.
    """
    if gram.is_complex() or gram.layout != torch.strided or gram.is_meta:
        raise InputError(
            f"a Gram matrix must be dense and real, got {gram.dtype} ({gram.layout}) on "
            f"{gram.device}; pass real similarities, e.g. (x @ x.conj().T).real"
        )
    if gram.is_quantized:
        gram = gram.dequantize()
    return gram if gram.dtype in (torch.float32, torch.float64) else gram.to(sum_dtype(gram.device))


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute matrix products in the dtype of their factors, whether autocast or TF32 is on or not.

    A user's ``torch.autocast`` would compute a kernel's ``x @ x.T`` in half precision, and
    ``torch.set_float32_matmul_precision("high")`` costs three digits of CKA.
    """
    with _full_float32():
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


@contextmanager
def _full_float32() -> Iterator[None]:
    """Compute products of float32 in float32; restore the user's settings afterwards.

    PyTorch has an old and a new interface for this setting and raises if they disagree, so each
    setting is changed and restored through the interface by which it was made.
    """
    mkldnn: Any = torch.backends.mkldnn  # its attributes are created at run time
    before = [
        (backend, backend.fp32_precision) for backend in (torch.backends.cuda.matmul, mkldnn.matmul)
    ]
    reduced = [backend for backend, precision in before if precision not in ("none", "ieee")]
    if not reduced:
        yield
        return
    legacy = _legacy_setting()
    try:
        if legacy is not None:
            torch.set_float32_matmul_precision("highest")
        for backend in reduced:
            backend.fp32_precision = "ieee"
        yield
    finally:
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
        for backend in reduced:
            backend.fp32_precision = "none"  # inherits torch.backends.fp32_precision
        for backend, precision in before:
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


def _legacy_setting() -> str | None:
    """Return the precision that was set through the old interface; None if it is not reduced."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.9 warns if the old interface is read
            setting: str = torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
    return setting if setting != "highest" else None


# If this environment variable is 0, torch's operators are used, as where nothing was compiled.
_SWITCH = "CKA_NATIVE"


def gram(rows: Tensor, samples_for_centre: int) -> Tensor | None:
    """Return the float32 Gram matrix (n, n) of (n, p) rows, shifted to near their centre.

    The mean of the first ``samples_for_centre`` rows is subtracted from every row. Sums over more
    than 256 columns are computed in float64. Neither the result nor the working space, about one
    float64 Gram matrix and 2 KB for each sample, depends on the number of threads. Returns None if
    the kernel is not available, if the rows are not dense float32 on a CPU, or if they need a
    derivative.
    """
    floats = _vector_floats()
    if floats == 0 or not _is_plain(rows):
        return None
    samples, columns = rows.shape
    threads = min(torch.get_num_threads(), _library().cka_most_threads(samples, columns))
    space = torch.empty(
        _library().cka_space_bytes(samples, columns), dtype=torch.uint8, device="cpu"
    )
    products = torch.empty(samples, samples, dtype=torch.float32, device="cpu")
    if type(products) is not Tensor:  # a mode such as FakeTensorMode replaces every new tensor
        return None
    _library().cka_gram(
        rows.data_ptr(),
        samples,
        columns,
        rows.stride(0),
        min(samples, samples_for_centre),
        floats,
        threads,
        space.data_ptr(),
        products.data_ptr(),
    )
    return products


def _is_plain(rows: Tensor) -> bool:
    """Whether the kernel can read ``rows``: float32 in CPU memory, columns contiguous, no grad."""
    if type(rows) is not Tensor or rows.dtype != torch.float32 or rows.device.type != "cpu":
        return False
    if rows.requires_grad or rows.is_neg() or rows.stride(1) != 1:
        return False
    try:
        rows.data_ptr()
    except RuntimeError:  # tensors inside torch.func transforms have no memory
        return False
    return forward_ad.unpack_dual(rows).tangent is None


@cache
def _vector_floats() -> int:
    """Return the width, in floats, of the vectors the kernel uses here; 0 if it cannot be used."""
    if os.environ.get(_SWITCH) == "0":
        return 0
    try:
        return int(_library().cka_vector_floats())
    except (OSError, AttributeError):  # not compiled, or compiled for another architecture
        return 0


@cache
def _library() -> ctypes.CDLL:
    """Load the compiled ``_gram.c``.

    Raises:
        OSError: if it was not compiled, or torch has not loaded the OpenMP that it needs.
    """
    spec = find_spec("cka.functional._gram")
    if spec is None or spec.origin is None:
        raise OSError("cka.functional._gram was not compiled")
    library = ctypes.CDLL(spec.origin)
    size, address = ctypes.c_int64, ctypes.c_void_p
    for count in (library.cka_space_bytes, library.cka_most_threads):
        count.argtypes = [size, size]
        count.restype = size
    library.cka_gram.argtypes = [
        *(address, size, size, size, size),
        *(ctypes.c_int, ctypes.c_uint, address, address),
    ]
    library.cka_gram.restype = None
    return library


HSICEstimator: TypeAlias = Literal["unbiased", "biased"]

# Size of the float64 copies that one matrix product reads; the Gram matrices keep their dtype.
SLAB_BYTES = 2 * 2**20
# Rounding error of a matrix product of equal rows, relative to its entries.
_EQUAL_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}


def min_samples(estimator: HSICEstimator) -> int:
    """Return the smallest n for which the divisor n (n-3) or (n-1)² is positive."""
    return 4 if estimator == "unbiased" else 2


def hsic(gram_x: Tensor, gram_y: Tensor, *, estimator: HSICEstimator = "unbiased") -> Tensor:
    """Return HSIC of two (n, n) Gram matrices of the same n samples.

    >>> x, y = torch.randn(2, 50, 8)
    >>> hsic(x @ x.T, y @ y.T).shape
    torch.Size([])

    Args:
        gram_x: Gram matrix (n, n) of any real dtype; it need not be centred.
        gram_y: Gram matrix (n, n) of the same samples in the same order.
        estimator: ``"unbiased"`` (Song et al. 2012, n ≥ 4) or ``"biased"`` (Gretton et al. 2005,
            n ≥ 2).

    Returns:
        A 0-d float64 tensor on the CPU. Gradients are propagated.

    Raises:
        InputError: if the matrices are not real, not square, differ in size, or are too small.
        SettingError: if the estimator is unknown.
    """
    check_estimator(estimator)
    for gram in (gram_x, gram_y):
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
            raise InputError(
                f"a Gram matrix must be square, got shape {tuple(gram.shape)}; "
                "pass (n, n) similarities of n samples, e.g. x @ x.T"
            )
    if gram_x.shape != gram_y.shape:
        raise InputError(
            f"the Gram matrices have {gram_x.shape[0]} and {gram_y.shape[0]} samples; "
            "compute both from the same samples"
        )
    check_sample_count(len(gram_x), estimator)
    of_x, of_y = real_float(gram_x), real_float(gram_y)
    return hsic_products([of_x], [of_y], estimator)[0][0, 0].to("cpu", torch.float64)


def check_estimator(estimator: str) -> None:
    """Check that the estimator is known.

    Raises:
        SettingError: if it is not.
    """
    if estimator == "sampled_neurons":
        raise SettingError(
            "estimator='sampled_neurons' needs features, not Gram matrices; use cka_from_features "
            "or CKA, or write estimator='unbiased' or 'biased'"
        )
    if estimator not in get_args(HSICEstimator):
        raise SettingError(
            f"cannot use {estimator!r} as an estimator; write 'unbiased' or 'biased'"
        )


def check_sample_count(samples: int, estimator: HSICEstimator) -> None:
    """Check that the estimate exists for n samples.

    Raises:
        InputError: if there are too few samples.
    """
    if samples < min_samples(estimator):
        raise InputError(
            f"the {estimator} estimator needs at least {min_samples(estimator)} samples, "
            f"got {samples}; pass more samples"
        )


def hsic_products(
    grams_x: Sequence[Tensor], grams_y: Sequence[Tensor] | None, estimator: HSICEstimator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return HSIC of every pair, (L1, L2), and of each matrix with itself, (L1,) and (L2,).

    The (n, n) matrices are centred and multiplied in float64, a few rows of all of them at a time.
    ``grams_y=None`` means the same matrices as ``grams_x``, which are then centred only once.
    """
    device = grams_x[0].device
    dtype = sum_dtype(device)
    samples = len(grams_x[0])
    cross: Tensor = torch.zeros((), device=device, dtype=dtype)
    self_x, self_y = cross, cross
    # Both sides have slabs of the same rows, also if the number of matrices differs.
    rows = rows_per_slab(max(len(grams_x), len(grams_y or ())), samples)
    with full_precision(device):
        if grams_y is None:
            for x in centred_slabs(grams_x, estimator, rows):
                cross = cross + x @ x.T
            self_x = self_y = cross.diagonal()
        else:
            for x, y in zip(
                centred_slabs(grams_x, estimator, rows),
                centred_slabs(grams_y, estimator, rows),
                strict=True,
            ):
                cross = cross + x @ y.T
                self_x = self_x + x.square().sum(1)
                self_y = self_y + y.square().sum(1)
    scale = _scale(samples, estimator)
    return cross * scale, self_x * scale, self_y * scale


def permuted_products(
    grams_x: Sequence[Tensor],
    grams_y: Sequence[Tensor] | None,
    estimator: HSICEstimator,
    orders: Tensor,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield parts of HSIC after each of the N permutations ``orders`` (N, n) of ``grams_y``.

    A part is ``(numbers, values)`` with values (k, L1 L2) for the k permutations ``numbers``; the
    parts of a permutation add up to its HSIC. Only ``grams_x`` is centred: a centred matrix is
    orthogonal to what centring subtracts from the other one. Both are symmetric, so each pair of
    samples is multiplied once.
    """
    flat = [gram.reshape(-1) for gram in (grams_x if grams_y is None else grams_y)]
    size = orders.shape[1]
    for pairs, x in centred_pairs(grams_x, estimator, len(grams_x)):
        # A pair (i, j) stands for (j, i) too.
        x *= (2 - (pairs[0] == pairs[1]).to(x.dtype)) * _scale(size, estimator)
        several = max(1, SLAB_BYTES // (len(flat) * x.shape[1] * x.itemsize))
        for start in range(0, len(orders), several):
            some = orders[start : start + several]
            entries = (some[:, pairs[0]] * size + some[:, pairs[1]]).flatten()
            y = torch.stack([gram.index_select(0, entries) for gram in flat]).to(x.dtype)
            with full_precision(x.device):
                products = x @ y.view(-1, x.shape[1]).T
            values = products.view(len(x), len(flat), len(some)).permute(2, 0, 1)
            yield slice(start, start + len(some)), values.flatten(1)


def centred_pairs(
    grams: Sequence[Tensor], estimator: HSICEstimator, matrices: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of samples (2, m), and the entries of the L centred matrices for them, (L, m).

    A pair is (i, j) with i < j, or i = j if the estimate is biased: the diagonal of a matrix that
    is U-centred is zero. The parts have a suitable size for that many ``matrices``.
    """
    size = len(grams[0])
    dtype = sum_dtype(grams[0].device)
    offsets, not_constant = _offsets(grams, estimator, dtype), _not_constant(grams)[:, :, 0]
    flat = [gram.reshape(-1) for gram in grams]
    pairs = torch.triu_indices(
        size, size, offset=1 if estimator == "unbiased" else 0, device=grams[0].device
    )
    for some in pairs.split(max(1, SLAB_BYTES // (matrices * dtype.itemsize)), 1):
        first, second = some
        entries = first * size + second
        values = torch.stack([gram.index_select(0, entries) for gram in flat]).to(dtype)
        values -= offsets[:, first]
        values -= offsets[:, second]
        values *= not_constant
        yield some, values


def _scale(samples: int, estimator: HSICEstimator) -> float:
    """Return the factor of the inner product of two centred matrices in their HSIC."""
    return 1 / (samples * (samples - 3) if estimator == "unbiased" else (samples - 1) ** 2)


def _offsets(grams: Sequence[Tensor], estimator: HSICEstimator, dtype: torch.dtype) -> Tensor:
    """Return the vectors m, (L, n), for which K - m1ᵀ - 1mᵀ is centred.

    Unbiased: m = u - Σu/(2(n-1)) with u = K̃1/(n-2), where K̃ is K with a zero diagonal.
    Biased: m = u - Σu/(2n) with u = K1/n, for which K - m1ᵀ - 1mᵀ = HKH.
    """
    n = len(grams[0])
    sums = torch.stack([gram.sum(1, dtype=dtype) for gram in grams])
    if estimator == "biased":
        means = sums / n
        return means - means.sum(1, keepdim=True) / (2 * n)
    means = (sums - torch.stack([gram.diagonal() for gram in grams])) / (n - 2)
    return means - means.sum(1, keepdim=True) / (2 * (n - 1))


def _not_constant(grams: Sequence[Tensor]) -> Tensor:
    """Return which of the L matrices have different entries, a bool tensor (L, 1, 1).

    The HSIC of a matrix with equal entries is exactly 0, but centring would leave its rounding
    error. Entries count as equal within the rounding error of a matrix product: the entries of
    features that vary around a centre differ by far more.
    """
    lowest = torch.stack([gram.amin() for gram in grams])
    highest = torch.stack([gram.amax() for gram in grams])
    size = torch.maximum(lowest.abs(), highest.abs())
    differ = highest - lowest > _EQUAL_TOLERANCE[lowest.dtype] * size
    # Comparisons with NaN are false, but the HSIC of a matrix with NaN must be NaN.
    return (differ | size.isnan())[:, None, None]


def rows_per_slab(matrices: int, samples: int) -> int:
    """Return how many rows of that many (n, n) matrices are copied at a time."""
    return max(1, SLAB_BYTES // (matrices * samples * torch.float64.itemsize))


def centred_slabs(grams: Sequence[Tensor], estimator: HSICEstimator, rows: int) -> Iterator[Tensor]:
    """Yield the L centred matrices a few rows at a time, flattened to (L, rows * n)."""
    n = len(grams[0])
    dtype = sum_dtype(grams[0].device)
    offsets = _offsets(grams, estimator, dtype)
    not_constant = _not_constant(grams)
    for start in range(0, n, rows):
        slab = torch.stack([gram[start : start + rows] for gram in grams]).to(dtype)
        slab -= offsets[:, start : start + rows, None]
        slab -= offsets[:, None, :]
        slab *= not_constant
        if estimator == "unbiased":
            slab.diagonal(offset=start, dim1=1, dim2=2).zero_()
        yield slab.flatten(1)


def centred(gram: Tensor, estimator: HSICEstimator) -> Tensor:
    """Return the whole centred matrix (n, n), of which HSIC is the inner product."""
    slabs = centred_slabs([gram], estimator, rows_per_slab(1, len(gram)))
    return torch.cat([slab.view(-1, len(gram)) for slab in slabs])
