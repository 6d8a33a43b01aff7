"""Where and how models run: unwrapped, on a device, in evaluation mode, and back again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

import torch
from torch import nn

from cka.errors import InputError


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside DataParallel, DistributedDataParallel and torch.compile wrappers.

    Hooks do not fire inside compiled graphs, and under DataParallel they fire once per replica, on
    a part of the batch each. One copy of the network itself gives the whole batch.
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif (original := _original(model)) is not None:
            model = original
        else:
            return model


def eager(models: list[nn.Module]) -> AbstractContextManager[object]:
    """Context in which compiled parts of the models run uncompiled, so that their hooks fire."""
    if not any(map(_has_compiled_parts, models)):
        return nullcontext()  # to ask for another stance imports the compiler, which takes a second
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


# The only private names of torch in this package, but for a tensor's _version.
def _original(model: nn.Module) -> nn.Module | None:
    """What ``torch.compile`` has wrapped, under the name it has in state dicts as well."""
    original = model.__dict__.get("_modules", {}).get("_orig_mod")
    return original if isinstance(original, nn.Module) else None


def _has_compiled_parts(model: nn.Module) -> bool:
    """Whether a part is compiled; where torch does not tell, each may be."""
    return any(
        _original(module) is not None or getattr(module, "_compiled_call_impl", True) is not None
        for module in model.modules()
    )


@contextmanager
def evaluating(models: list[nn.Module]) -> Iterator[None]:
    """Evaluation mode for every module, and its own mode back afterwards.

    Flags are set one by one: ``model.train(was_training)`` would put a frozen batch norm inside a
    training model back into training.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        # Backwards, so that a module listed twice gets the mode it had first.
        for module, training in reversed(modes):
            module.training = training


def device_for(model: nn.Module, device: torch.device | None, name: str) -> torch.device:
    """Where a model is to run.

    The device asked for; else where the model is, if that is an accelerator; else the current
    accelerator, or the CPU where there is none. A model spread over several devices runs as it
    is, and batches go to its first weight.

    Raises:
        InputError: if a spread model is asked onto one device.
    """
    here = homes(model)
    if len(here) > 1:
        if device is not None:
            raise InputError(
                f"{name} is spread over {', '.join(map(str, here))}; "
                f"leave device out to run it as it is, or move it to {device} first"
            )
        return here[0]
    if device is not None:
        return _with_index(device)
    if here and here[0].type != "cpu":
        return here[0]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else _with_index(accelerator)


def homes(model: nn.Module) -> list[torch.device]:
    """Devices the weights and buffers are on, each once (meta tensors are nowhere)."""
    tensors = chain(model.parameters(), model.buffers())
    return list(dict.fromkeys(one.device for one in tensors if one.device.type != "meta"))


@contextmanager
def placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Have the model on a device, and back where it was afterwards."""
    here = homes(model)
    if len(here) != 1 or here[0] == device:
        yield
        return
    try:
        model.to(device)
        yield
    finally:
        model.to(here[0])


def input_dtype(model: nn.Module) -> torch.dtype | None:
    """Floating-point dtype all weights share, which inputs are given in; None if they differ."""
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` as ``cuda:0``, so that devices can be compared."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.empty(0, device=device).device
