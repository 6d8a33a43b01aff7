"""Sparse tensors: COO, and the compressed layouts CSR, CSC, BSR and BSC.

How many elements a result has depends on values, so results are computed on the CPU and put into
memory of the device. Torch's own operator runs before, as far as it can without cuSPARSE.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from emulated_cuda import torch_private
from emulated_cuda.values import graphs, operators, staleness
from emulated_cuda.values.aliases import alias, on_cpu
from emulated_cuda.values.computing import on_the_cpu
from emulated_cuda.values.operators import Kernel, Unavailable, tensors_in, thread
from emulated_cuda.values.results import upload

KEYS = ("SparseCUDA", "SparseCsrCUDA")


def computing(name: str, operator: Any, original: Kernel) -> Kernel:
    """Return a kernel that computes an operator with sparse arguments."""
    schema = torch_private.schema_of(operator)
    written = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    names = [argument.name for argument in schema.arguments]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.arguments is not None:
            return original(keyset, *args, **kwargs)
        graphs.refuse(name)
        if staleness.is_possible():
            staleness.check((args, kwargs))
        results = None
        # What it reads back in between was not computed, so it may fail for no fault of the user.
        with contextlib.suppress(Unavailable, RuntimeError, IndexError, ValueError):
            if not written:
                results = operators.run(original, keyset, args, kwargs)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        with on_the_cpu():
            on_host = {key: on_cpu(value) for key, value in named.items()}
            computed = operator(
                *[on_host[key] for key in names[: len(args)]],
                **{key: on_host[key] for key in kwargs},
            )
            if not written and _is_written(results, computed):
                return _known(results, named)
            results = None  # it has another size than the values ask for
            if not written and not any(True for _ in tensors_in(computed)):
                return computed  # a number
            for key in written:
                if named.get(key) is not None:
                    _copy_back(named[key], on_host[key])
        if written:
            return named[written[0]] if len(written) == 1 else tuple(named[key] for key in written)
        return _uploaded(computed, named)

    return kernel


def _uploaded(computed: Any, named: Any) -> Any:
    device = next(tensor.device for tensor in tensors_in(named) if tensor.is_cuda)
    with on_the_cpu():
        return _known(upload(computed, device), named)


def _known(results: Any, named: Any) -> Any:
    """Return new results, of which a kernel that ran earlier has written nothing."""
    if staleness.is_possible():  # of the arguments it was checked before
        staleness.propagate((), results, given=named)
    return results


def _is_written(results: Any, computed: Any) -> bool:
    """Write into the parts of the operator's own result, if they have the sizes to be computed."""
    if not isinstance(results, torch.Tensor) or not isinstance(computed, torch.Tensor):
        return False
    if results.layout is not computed.layout or results.shape != computed.shape:
        return False
    pairs = list(zip(_parts(results), _parts(computed), strict=True))
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in pairs):
        return False
    if results.layout is torch.sparse_coo and results.is_coalesced() != computed.is_coalesced():
        return False
    for target, value in pairs:
        alias(target).copy_(value)
    return True


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return torch_private.sparse_parts(tensor)
    return (*torch_private.compressed_parts(tensor), tensor.values())


def _copy_back(target: torch.Tensor, computed: torch.Tensor) -> None:
    """Give an argument on the device what the operator has written into its CPU form."""
    if target.layout is torch.strided and target.shape == computed.shape:
        return  # it is an alias
    target.copy_(upload(computed, target.device))
