"""Keep ``torch.jit.trace`` and dispatch modes apart, because they do not work together.

Under any mode, even one that does nothing, code is traced wrongly or not at all. Traced code runs
under a mode, but passes numbers to operators that expect tensors (torch 2.9 to 2.15).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from pytest_cka_memory.meters import torch_private, torch_versions

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def without_mode(function: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """Return `function`, run without the innermost mode if that is of `kind`."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        modes = torch_private.active_modes() if torch_private.KNOWS_MODES else []
        if not modes or type(modes[-1]) is not kind:
            return function(*args, **kwargs)
        mode = torch_private.pop_mode()
        try:
            return function(*args, **kwargs)
        finally:
            torch_private.push_mode(mode)

    return run


def is_refused_number(error: RuntimeError) -> bool:
    """Whether an operator did not start because a number was passed for one of its tensors."""
    return torch_versions.REFUSED_NUMBER in str(error)


def numbers_as_tensors(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `args` with a 0-dimensional tensor for each number that is passed for a tensor."""
    schema = torch_private.schema_of(operator)
    wanted = [argument.type.kind() == "TensorType" for argument in schema.arguments]
    with torch_private.no_dispatch():
        return tuple(
            torch.tensor(arg, dtype=_DTYPES[type(arg)]) if tensor and type(arg) in _DTYPES else arg
            for arg, tensor in zip(args, wanted, strict=False)
        )
