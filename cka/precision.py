"""Arithmetic that does not depend on the caller's speed settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    wanted = torch.get_float32_matmul_precision()
    try:
        if wanted != "highest":
            torch.set_float32_matmul_precision("highest")
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield
    finally:
        if wanted != "highest":
            torch.set_float32_matmul_precision(wanted)
