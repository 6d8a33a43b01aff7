"""Gram matrices of float32 on a CPU, by ``_gram.c``: in a third of the time of products by torch.

It is compiled where the package is installed, if that can be. Where it was not, or is of no use to
this processor, or torch brings another OpenMP than GNU's, :func:`gram` has no answer.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The most working space of all threads: so much and so many Gram matrices, or, if that is more,
# such a share of the features.
_SPACE_BYTES = 2**20
_SPACE_GRAMS = 5
_SHARE = 16


def gram(rows: Tensor, samples_for_centre: int) -> Tensor | None:
    """Gram matrix (n, n) of (n, p) rows, each column less the mean of its first samples.

    Sums over more than 256 columns are made in float64. None for rows that cannot be taken as they
    lie in memory, and for those whose derivatives are asked for.
    """
    floats = _vector_floats()
    if floats == 0 or not _is_plain(rows):
        return None
    samples, columns = rows.shape
    space_bytes = _library().cka_space(samples)
    most_bytes = max(_SPACE_BYTES + _SPACE_GRAMS * 4 * samples**2, rows.nbytes // _SHARE)
    useful = _library().cka_most_threads(columns)
    threads = min(torch.get_num_threads(), useful, most_bytes // space_bytes)
    space = torch.empty(threads * space_bytes, dtype=torch.uint8, device="cpu")
    products = torch.empty(samples, samples, dtype=torch.float32, device="cpu")
    if type(products) is not Tensor:  # a mode of the user's makes something else of every tensor
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
    """Whether `rows` are float32 numbers in memory, one sample after another, and nothing else."""
    if type(rows) is not Tensor or rows.dtype != torch.float32 or rows.device.type != "cpu":
        return False
    if rows.requires_grad or rows.is_neg() or rows.stride(1) != 1:
        return False
    try:
        rows.data_ptr()
    except RuntimeError:  # what torch.func transforms has no memory of its own
        return False
    return forward_ad.unpack_dual(rows).tangent is None


@cache
def _vector_floats() -> int:
    """Floats in the vectors of this processor that the library can use; 0 where there is none."""
    try:
        return int(_library().cka_vector_floats())
    except (OSError, AttributeError):  # none, or one for a processor that it knows nothing of
        return 0


@cache
def _library() -> ctypes.CDLL:
    """The compiled ``_gram.c``.

    Raises:
        OSError: where there is none, or torch has not loaded the OpenMP that it needs.
    """
    found = find_spec("cka.functional._gram")
    if found is None or found.origin is None:
        raise OSError("cka.functional._gram was not compiled")
    library = ctypes.CDLL(found.origin)
    size, address = ctypes.c_int64, ctypes.c_void_p
    for count in (library.cka_space, library.cka_most_threads):
        count.argtypes = [size]
        count.restype = size
    library.cka_gram.argtypes = [
        *(address, size, size, size, size),
        *(ctypes.c_int, ctypes.c_uint, address, address),
    ]
    library.cka_gram.restype = None
    return library
