"""A device of fake tensors: shapes, dtypes and storages without bytes, for code to run on.

PyTorch's spare device type (PrivateUse1)
is set up from Python; what arrives there goes on under a fake tensor mode. Tensors of other
devices are left alone, so data loaders and the rest of the process compute as ever.
"""

import sys
from functools import cache
from typing import Any

import torch

from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters.predicted.device_guard import Guard, install
from pytest_cka_memory.meters.predicted.dispatch import DEVICE_TYPE, PredictingMode, Seen
from pytest_cka_memory.meters.predicted.refusals import (
    refuse_autocast,
    refuse_compiling,
    refuse_numpy,
)
from pytest_cka_memory.meters.torch_private import (
    COPY_FROM,
    BackendModule,
    DispatchKey,
    FakeTensor,
    ForceDispatchKeyGuard,
    callback_handler,
    dispatch_keys_excluded,
    dispatch_keys_included,
    privateuse1_backend_name,
    set_up_python_backend,
)

_UNTAKEN = "privateuseone"
_MOST_CARDS = 64


class _Module(BackendModule):
    """``torch.predicted``, asked by torch itself and by code that is written for any device."""

    def is_available(self) -> bool:
        """Else ``torch.accelerator`` would take it for one: to wait for, to pin memory for."""
        return False

    def device_count(self) -> int:
        return _MOST_CARDS

    def synchronize(self, device: object = None) -> None:
        """Nothing runs, so nothing is waited for."""

    def empty_cache(self) -> None:
        """A prediction empties its cache where it cleans."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Asked by every ``torch.autocast``: those that turn it off are let be, as checkpoints'."""
        if sys._getframe(1).f_locals.get("enabled", True):
            refuse_autocast()
        return [torch.float16, torch.bfloat16]


def claim(seen: Seen) -> torch.device:
    """Return a device of fake tensors, and tell `seen` of every operator that returns one there.

    Raises:
        DeviceError: where torch's spare device type is taken by another backend.
    """
    mode = _mode()
    index = len(mode.seen)
    if index == _MOST_CARDS:
        raise DeviceError(f"a process predicts for {_MOST_CARDS} cards at most")
    mode.seen[index] = seen
    return torch.device(DEVICE_TYPE, index)


@cache
def _mode() -> PredictingMode:
    """The process's one mode, with the device registered; it cannot be taken back."""
    taken = privateuse1_backend_name()
    if taken != _UNTAKEN:
        raise DeviceError(
            f"torch's spare device type is taken by {taken!r} in this process; "
            "predict:cuda needs it, so run predicted tests in a process without that backend"
        )
    mode = PredictingMode()
    try:
        guard = Guard()
        set_up_python_backend(DEVICE_TYPE, backend_module=_Module(), device_guard=guard)
        _keep.append(guard)
        install()
        _route(mode)
    except RuntimeError as error:
        raise DeviceError(f"predict:cuda cannot set up its device: {error}") from error
    return mode


def _route(mode: PredictingMode) -> None:
    """Send every operator that reaches the device on, under `mode`."""

    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        with _modes_on(), mode:
            return func(*args, **kwargs)

    def copy_from(source: torch.Tensor, target: torch.Tensor, *_: object) -> torch.Tensor:
        run(target.copy_, source)
        return target

    everything, aten = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))
    everything.fallback(run, "PrivateUse1")
    # The one that torch.tensor(..., device=...) needs, and for which torch asks no fallback.
    aten.impl(COPY_FROM, copy_from, "PrivateUse1")
    _keep.extend((everything, aten))
    _refuse(mode)


def _refuse(mode: PredictingMode) -> None:
    """Refuse what never reaches the mode as an operator, and would fail without a reason."""
    plain_numpy = FakeTensor.numpy

    def numpy(tensor: FakeTensor, **options: Any) -> Any:
        return refuse_numpy() if tensor.fake_mode is mode else plain_numpy(tensor, **options)

    setattr(FakeTensor, "numpy", numpy)  # noqa: B010  # mypy would have it a method
    callback_handler.register_start_callback(refuse_compiling)


_keep: list[object] = []
"""What torch refers to, and does not hold: registrations end with their Python objects."""


def _modes_on() -> Any:
    """Let modes see operators again: ``torch.tensor(..., device=...)`` hides its own from them."""
    hidden = dispatch_keys_excluded()
    for key in (DispatchKey.Python, DispatchKey.PythonTLSSnapshot):
        hidden = hidden.remove(key)
    return ForceDispatchKeyGuard(dispatch_keys_included(), hidden)
