"""What a comparison can be asked for: checks of its settings and models, and their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

from cka.capture.layers import Selection
from cka.errors import InputError, SettingError
from cka.functional.kernels import Kernel
from cka.running.placement import unwrap

EstimatorName: TypeAlias = Literal["unbiased", "biased", "exact", "sampled_neurons"]


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison, with its selected layers and its name."""

    module: nn.Module
    selection: Selection
    name: str


def check_settings(estimator: str, hsic_batch_size: int | None) -> None:
    """Check the estimator and the size of parts.

    Raises:
        SettingError: if the estimator is unknown, or the size is too small or has no meaning.
    """
    if estimator not in get_args(EstimatorName):
        raise SettingError(
            f"cannot use {estimator!r} as an estimator; write "
            + ", ".join(map(repr, get_args(EstimatorName)))
        )
    if hsic_batch_size is None:
        return
    if estimator == "exact":
        raise SettingError(
            f"the exact estimator does not split batches, got hsic_batch_size={hsic_batch_size}; "
            "omit it"
        )
    if hsic_batch_size < 4:
        raise SettingError(
            f"hsic_batch_size must be at least 4, got {hsic_batch_size}; write e.g. 64"
        )


def check_model(model: object, name: str) -> None:
    """Check that hooks can be registered on a model.

    Raises:
        InputError: if it is not a torch.nn.Module; the message contains ``name``.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} must be a torch.nn.Module, got {type(model).__name__}; "
            "write a Module whose forward calls it"
        )
    if isinstance(unwrap(model), torch.jit.ScriptModule):
        raise InputError(
            f"{name} is a scripted or traced model ({type(unwrap(model)).__name__}): torch.jit "
            "calls no hooks of its layers, so their outputs cannot be read; pass the nn.Module "
            "from which it was made, with the same weights"
        )


def model_names(
    first: nn.Module, second: nn.Module, given1: str | None, given2: str | None
) -> tuple[str, str]:
    """Return the models' names; two models of one class get a number if no name is given."""
    one, two = type(first).__name__, type(second).__name__
    if first is second:
        return given1 or given2 or one, given2 or given1 or one
    if one == two and given1 is None and given2 is None:
        return f"{one} 1", f"{two} 2"
    return given1 or one, given2 or two


def kernel_name(kernel: Kernel) -> str:
    """Return the name of a kernel in the result."""
    return getattr(kernel, "__name__", None) or repr(kernel)
