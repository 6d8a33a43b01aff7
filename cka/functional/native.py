"""Gram matrices of float32 features on a CPU, by ``_gram.c``: three times as fast as torch.

The extension is optional: it is compiled when the package is installed, if a compiler is
available. :func:`gram` returns None if it was not compiled, if the processor has no vectors that it
supports, if torch was not built with GNU's OpenMP, or if the environment variable ``CKA_NATIVE``
is 0.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

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
