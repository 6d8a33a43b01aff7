"""Numbers in place of tensors, as in ``x * 2``.

Torch wraps the number in a tensor of the lowest priority for the type of the result, and gives the
number to kernels in Python, but its own kernels then refuse it. They get a tensor of the type that
leads to the same result.
"""

from __future__ import annotations

from typing import Any

import torch

from emulated_cuda import torch_private
from emulated_cuda.torch_versions import NOT_A_TENSOR
from emulated_cuda.values.operators import Kernel

_NUMBERS = (int, float, bool, complex)
_NOT_OPERANDS = ("condition", "mask", "out")


def accepting_numbers(operator: Any, kernel: Kernel) -> Kernel:
    """Return torch's kernel of an operator so that it also accepts numbers for tensors."""
    arguments = torch_private.schema_of(operator).arguments
    positions = [
        index
        for index, argument in enumerate(arguments)
        if str(argument.type) in ("Tensor", "Optional[Tensor]") and not argument.kwarg_only
    ]
    operands = [index for index in positions if arguments[index].name not in _NOT_OPERANDS]
    if len(positions) < 2:
        return kernel

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for index in positions:
            if index < len(args) and type(args[index]) in _NUMBERS:
                others = [args[i] for i in operands if i < len(args)]
                args = tuple(
                    _tensor_for(value, others) if position in positions else value
                    for position, value in enumerate(args)
                )
                break
        return kernel(keyset, *args, **kwargs)

    return call


def if_refused(operator: Any) -> Kernel:
    """Return an operator for the CPU that accepts numbers for tensors, as precise as torch's."""
    with_tensors = accepting_numbers(operator, lambda _, *args, **kwargs: operator(*args, **kwargs))

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return operator(*args, **kwargs)
        except RuntimeError as error:
            if NOT_A_TENSOR.value not in str(error):
                raise
            return with_tensors(None, *args, **kwargs)

    return call


# ---- Numbers in tensors on the device: torch cannot pass them to a kernel in Python ----


def power_of_number(original: Kernel) -> Kernel:
    """Return the kernel of a number's power, by way of that for two tensors."""
    of_tensors = torch.library.get_kernel("aten::pow.Tensor_Tensor", "CUDA").call_boxed

    def call(keyset: Any, base: Any, exponent: torch.Tensor) -> Any:
        if base == 1:
            return original(keyset, base, exponent)
        dtype = torch.result_type(exponent, base)
        with torch_private.without_torch_function():
            number = torch.empty((), dtype=dtype, device=exponent.device)
        return of_tensors(keyset, number, exponent)

    return call


def power_of_number_out(original: Kernel) -> Kernel:
    """Return the same for a kernel with ``out``."""
    of_tensors = torch.library.get_kernel("aten::pow.Tensor_Tensor_out", "CUDA").call_boxed

    def call(keyset: Any, base: Any, exponent: torch.Tensor, *, out: torch.Tensor) -> Any:
        if base == 1:
            return original(keyset, base, exponent, out=out)
        dtype = torch.result_type(exponent, base)
        with torch_private.without_torch_function():
            number = torch.empty((), dtype=dtype, device=exponent.device)
        return of_tensors(keyset, number, exponent, out=out)

    return call


def _tensor_for(value: Any, others: list[Any]) -> Any:
    if type(value) not in _NUMBERS:
        return value
    tensor = next((other for other in others if isinstance(other, torch.Tensor)), None)
    if tensor is None:
        return torch.tensor(value)
    dtype = torch.result_type(tensor, value)
    try:
        return torch.scalar_tensor(value, dtype=dtype, device="cpu")  # faster than torch.tensor
    except (RuntimeError, OverflowError, TypeError):  # the number does not fit; it is not used
        return torch.tensor(1, dtype=dtype)
