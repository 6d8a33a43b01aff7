"""Numbers in place of tensors, as in ``x * 2``.

Torch wraps the number in a tensor of the lowest priority for the type of the result, and gives the
number to kernels in Python, but its own kernels then refuse it. They get a tensor of the type that
leads to the same result.
"""

from __future__ import annotations

from typing import Any

import torch

from pytest_cka_memory.emulated import torch_private
from pytest_cka_memory.emulated.values.operators import Kernel

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


def _tensor_for(value: Any, others: list[Any]) -> Any:
    if type(value) not in _NUMBERS:
        return value
    tensor = next((other for other in others if isinstance(other, torch.Tensor)), None)
    dtype = None if tensor is None else torch.result_type(tensor, value)
    try:
        return torch.tensor(value, dtype=dtype)
    except (RuntimeError, OverflowError, TypeError):  # the number does not fit; it is not used
        return torch.tensor(1, dtype=dtype)
