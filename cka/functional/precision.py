"""Arithmetic that does not depend on the caller's speed settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def gram_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype a Gram matrix is computed in: float64 stays, everything else becomes float32.

    Half precision overflows in a Gram matrix (65504 is reached by 256 features of 16).
    """
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def sum_dtype(device: torch.device) -> torch.dtype:
    """Dtype of HSIC sums: float64, or float32 on devices that have no float64 (Apple's MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in their own dtype, whatever autocast or TF32 setting is in force.

    A user's ``torch.autocast`` would turn a kernel's ``x @ x.T`` into half precision, and
    ``torch.set_float32_matmul_precision("high")`` costs three digits of CKA.
    """
    with _float32_kept():
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


@contextmanager
def _float32_kept() -> Iterator[None]:
    """Products of float32 in float32.

    PyTorch has two ways to say so, and raises where it finds that they disagree: what was set in
    one way has to be taken back, and put back, in the same.
    """
    mkldnn: Any = torch.backends.mkldnn  # its attributes are made at run time
    before = [(one, one.fp32_precision) for one in (torch.backends.cuda.matmul, mkldnn.matmul)]
    reduced = [one for one, precision in before if precision not in ("none", "ieee")]
    if not reduced:
        yield
        return
    legacy = _legacy_setting()
    try:
        if legacy is not None:
            torch.set_float32_matmul_precision("highest")
        for one in reduced:
            one.fp32_precision = "ieee"
        yield
    finally:
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
        for one in reduced:
            one.fp32_precision = "none"  # which takes after torch.backends.fp32_precision
        for one, precision in before:
            if one.fp32_precision != precision:
                one.fp32_precision = precision


def _legacy_setting() -> str | None:
    """What ``torch.set_float32_matmul_precision`` has reduced; None where the new way was taken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.9 warns of asking in the old way
            setting: str = torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
    return setting if setting != "highest" else None
