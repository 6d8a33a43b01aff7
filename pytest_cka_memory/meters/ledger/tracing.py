"""What ``torch.jit.trace`` and a dispatch mode cannot do together, done apart.

Under any mode at all, even one that does nothing, code is traced wrongly or not at all; what was
traced runs, but shows numbers where its operators want tensors (torch 2.9 to 2.15).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from pytest_cka_memory.meters import torch_private

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def without_mode(function: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """Return `function`, run without the innermost mode where that is of `kind`."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch_private.TELLS_MODES or type(torch_private.innermost_mode()) is not kind:
            return function(*args, **kwargs)
        mode = torch_private.pop_mode()
        try:
            return function(*args, **kwargs)
        finally:
            torch_private.push_mode(mode)

    return run


def is_refused_number(error: RuntimeError) -> bool:
    """Whether an operator did not start, because one of its tensors came as a number."""
    return "Expected a value of type 'Tensor' for argument" in str(error)


def numbers_as_tensors(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args` with a tensor of no dimensions for each number in the place of a tensor."""
    schema = torch_private.schema_of(operator)
    wanted = [argument.type.kind() == "TensorType" for argument in schema.arguments]
    with torch_private.no_dispatch():
        return tuple(
            torch.tensor(arg, dtype=_DTYPES[type(arg)]) if tensor and type(arg) in _DTYPES else arg
            for arg, tensor in zip(args, wanted, strict=False)
        )
