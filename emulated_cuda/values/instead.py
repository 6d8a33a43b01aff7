"""Results of the CPU in place of a CUDA operator that the library cannot run."""

from __future__ import annotations

from typing import Any

import torch

from emulated_cuda.values import errors_on_device
from emulated_cuda.values.aliases import alias, on_cpu
from emulated_cuda.values.operators import Kernel, tensors_in
from emulated_cuda.values.results import replace, upload

LOW = (
    torch.float16,
    torch.bfloat16,
    *tuple(dtype for name, dtype in vars(torch).items() if name.startswith("float8_")),
)
"""Types for which the CPU lacks some operators."""


def instead(schema: Any, call: Kernel, args: Any, kwargs: Any) -> Any:
    """Return the CPU's result in memory of the device, without the operator's workspace."""
    device = device_of(args, kwargs)
    written = {argument.name for argument in schema.arguments if is_written(argument)}
    if not written:
        return upload(_call_on_cpu(call, args, kwargs), device)
    names = [argument.name for argument in schema.arguments]
    targets: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prepared(key: str, value: Any) -> Any:
        if key not in written or not isinstance(value, torch.Tensor):
            return on_cpu(value)
        # An out= argument may have to grow, which must not happen at addresses of others.
        fresh = alias(value).clone() if value.numel() else torch.empty(0, dtype=value.dtype)
        targets.append((value, fresh))
        return fresh

    new_args = [prepared(names[index], value) for index, value in enumerate(args)]
    new_kwargs = {key: prepared(key, value) for key, value in kwargs.items()}
    call(*new_args, **new_kwargs)
    for target, value in targets:
        replace(target, value)
    outputs = [target for target, _ in targets]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def device_of(args: Any, kwargs: Any) -> torch.device:
    """Return the device of an operator's arguments; the current one if none is on a device."""
    for tensor in tensors_in((args, kwargs)):
        if tensor.is_cuda:
            return tensor.device
    return torch.device("cuda", torch.cuda.current_device())


def is_written(argument: Any) -> bool:
    """Whether an operator writes an argument, by its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _call_on_cpu(call: Kernel, args: Any, kwargs: Any) -> Any:
    args = [on_cpu(value) for value in args]
    kwargs = {key: on_cpu(value) for key, value in kwargs.items()}
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        low = next((t.dtype for t in tensors_in((args, kwargs)) if t.dtype in LOW), None)
        if low is None or not errors_on_device.is_unsupported(error):
            raise
        return _cast(call(*_cast(args, LOW, torch.float32), **kwargs), (torch.float32,), low)


def _cast(value: Any, kinds: tuple[torch.dtype, ...], dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in kinds else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(item, kinds, dtype) for item in value])
    return value
