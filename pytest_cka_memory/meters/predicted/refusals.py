"""Raise errors for code that cannot be predicted: the user's line, the reason and what to do."""

from typing import Any

import torch

from pytest_cka_memory.core.allocations import format_frames, user_frames
from pytest_cka_memory.errors import PredictionError
from pytest_cka_memory.meters.torch_private import (
    FakeTensor,
    NeedsShapeError,
    NeedsValueError,
    UnfakeableError,
    UnknownShapesError,
    schema_of,
)

_UNPREDICTABLE = (
    NeedsValueError,
    NeedsShapeError,
    UnknownShapesError,
    UnfakeableError,
    NotImplementedError,
)
"""What fake tensors raise if an operator needs values or has no known shape rule."""

_NO_VALUE = "it needs a value, and predicted tensors have none"
_WITH_VALUES = "use --cka-memory-device=emulate:cuda, which computes values"


def is_unpredictable(error: RuntimeError) -> bool:
    """Whether the code is correct but its result cannot be predicted."""
    return isinstance(error, _UNPREDICTABLE) or "no fake impl registered" in str(error)


def refusal(what: str, why: str, instead: str) -> PredictionError:
    """Return the error that `what` cannot be predicted, with the user's line."""
    # Frames of contextlib are left out because Dynamo is entered through a context manager.
    lines = [line for line in format_frames(user_frames()) if "/contextlib.py:" not in line]
    place = f"{lines[0]}: " if lines else ""
    return PredictionError(
        f"{place}cannot predict {what}: {why}. {instead}, or measure this test on a GPU"
    )


def refusal_of(func: Any, error: Exception) -> PredictionError:
    """Return the error for an operator that raised an error that :func:`is_unpredictable`."""
    if isinstance(error, NeedsValueError):
        why = _NO_VALUE
        avoid = "Keep .item(), .tolist(), float() and branches on tensors out of the test"
        instead = f"{avoid}, {_WITH_VALUES}"
    elif isinstance(error, NeedsShapeError):
        why = "the shape of its result depends on values, and predicted tensors have none"
        instead = f"Use a fixed shape, e.g. torch.where(mask, x, y) for x[mask], {_WITH_VALUES}"
    else:
        why = "the shapes of its results are not known without running it"
        instead = "Register a rule for the shapes with torch.library.register_fake"
    return refusal(func.name(), why, instead)


def refuse_lost_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to write a predicted tensor into one that has values, which would keep its old values.

    Raises:
        PredictionError: names the device of the target.
    """
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = args[place] if place < len(args) else kwargs.get(argument.name)
        if isinstance(target, torch.Tensor) and not isinstance(target, FakeTensor):
            raise refusal(
                func.name(),
                f"it writes a predicted tensor, which has no values, into one on {target.device}",
                "Create both on cka_memory.device",
            )


def refuse_numpy() -> None:
    """Refuse ``.numpy()`` of a predicted tensor."""
    raise refusal(".numpy()", _NO_VALUE, "Keep it out of the test")


def refuse_autocast() -> None:
    """Refuse ``torch.autocast``: which operators it casts depends on the device."""
    raise refusal(
        "torch.autocast", "which operators it casts depends on CUDA", "Use model.bfloat16()"
    )


def refuse_compiling(*_: object) -> None:
    """Refuse ``torch.compile``: which tensors it allocates depends on what it fuses."""
    raise refusal(
        "torch.compile",
        "which tensors compiled code allocates depends on its compiler",
        "Run it under torch.compiler.set_stance('force_eager') for the figures of uncompiled code",
    )
