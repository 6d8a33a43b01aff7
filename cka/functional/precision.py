"""Dtypes for Gram matrices and sums, and full float32 precision whatever the user has set."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
