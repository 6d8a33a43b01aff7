"""Refuses, with the user's line and what to do, what fake tensors cannot tell."""

from typing import Any

import torch

from pytest_cka_memory.core.allocations import callers, written
from pytest_cka_memory.errors import PredictionError
from pytest_cka_memory.meters.torch_private import (
    FakeTensor,
    NeedsShapeError,
    NeedsValueError,
    UnfakeableError,
    UnknownShapesError,
    schema_of,
)

_UNKNOWABLE = (
    NeedsValueError,
    NeedsShapeError,
    UnknownShapesError,
    UnfakeableError,
    NotImplementedError,
)
"""What fake tensors raise where the answer needs values, or where no shape rule is known."""

_NO_VALUE = "it needs a value, and predicted tensors have none"


def is_unknowable(error: RuntimeError) -> bool:
    """Whether the caller made no mistake, but asked what fake tensors cannot tell."""
    return isinstance(error, _UNKNOWABLE) or "no fake impl registered" in str(error)


def refusal(what: str, why: str, instead: str) -> PredictionError:
    """The error for `what`, at the user's line."""
    # Dynamo is entered through a context manager.
    lines = [line for line in written(callers()) if "/contextlib.py:" not in line]
    place = f"{lines[0]}: " if lines else ""
    return PredictionError(
        f"{place}cannot predict {what}: {why}; {instead}, or measure this test on a device"
    )


def refusal_of(func: Any, error: Exception) -> PredictionError:
    """The error for an operator, by one that :func:`is_unknowable`."""
    if isinstance(error, NeedsValueError):
        why = _NO_VALUE
        instead = "keep .item(), .tolist(), float() and branches on tensors out of the test"
    elif isinstance(error, NeedsShapeError):
        why = "the shape of its result depends on values, and predicted tensors have none"
        instead = "write it with a fixed shape, e.g. torch.where(mask, x, y) for x[mask]"
    else:
        why = "its shapes are not known without running it"
        instead = "register a rule for them with torch.library.register_fake"
    return refusal(func.name(), why, instead)


def refuse_lost_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to write what has no value into a tensor that has: it would keep its old one.

    Raises:
        PredictionError: naming the device of the target.
    """
    for at, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = args[at] if at < len(args) else kwargs.get(argument.name)
        if isinstance(target, torch.Tensor) and not isinstance(target, FakeTensor):
            raise refusal(
                func.name(),
                f"it writes a predicted tensor, which has no values, into one on {target.device}",
                "make both on cka_memory.device",
            )


def refuse_numpy() -> None:
    """Refuse ``.numpy()`` of a predicted tensor."""
    raise refusal(".numpy()", _NO_VALUE, "keep it out of the test")


def refuse_autocast() -> None:
    """Refuse ``torch.autocast``: which operators it would cast is CUDA's own list."""
    raise refusal("torch.autocast", "it casts by CUDA's own rules", "write model.bfloat16()")


def refuse_compiling(*_: object) -> None:
    """Refuse ``torch.compile``: what it fuses is not allocated, and what it fuses is not known."""
    raise refusal(
        "torch.compile",
        "which tensors compiled code allocates depends on its compiler",
        "write torch.compiler.set_stance('force_eager') around it for the uncompiled figures",
    )
