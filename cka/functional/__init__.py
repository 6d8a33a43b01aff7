"""Functions from feature matrices to CKA: kernels, HSIC, sums over batches.

This module itself says how all of them multiply matrices: in which dtypes, in full float32
precision, and by ``_gram.c``. That extension computes Gram matrices of float32 features on a CPU
three times as fast as torch. It is compiled when the package is installed, if a compiler is
available. :func:`gram` returns None if it was not compiled, if the processor has no vectors that it
supports, if torch was not built with GNU's OpenMP, or if the environment variable ``CKA_NATIVE`` is
0.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cka.errors import InputError


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
