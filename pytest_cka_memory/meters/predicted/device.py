"""A device of fake tensors, which have shapes, dtypes and storages but no bytes.

It uses PyTorch's device type for out-of-tree backends (PrivateUse1), registered from Python. All of
its operators run under a fake tensor mode. Tensors of other devices are not affected, so data
loaders and the rest of the process compute as usual.
"""

import sys
from functools import cache
from typing import Any

import torch

from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters.predicted.device_guard import Guard, install
from pytest_cka_memory.meters.predicted.dispatch import DEVICE_TYPE, OnOperator, PredictingMode
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
    allow_foreach,
    callback_handler,
    dispatch_keys_excluded,
    dispatch_keys_included,
    privateuse1_backend_name,
    set_up_python_backend,
)

_UNUSED_NAME = "privateuseone"
_MAX_DEVICES = 64


class _Module(BackendModule):
    """The module ``torch.predicted``, which torch and device-independent code call."""

    def is_available(self) -> bool:
        """Return False, or ``torch.accelerator`` would synchronize it and pin memory for it."""
        return False

    def device_count(self) -> int:
        return _MAX_DEVICES

    def synchronize(self, device: object = None) -> None:
        """Do nothing, because no kernel runs."""

    def empty_cache(self) -> None:
        """Do nothing; the meter empties the simulated cache when it cleans."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Refuse ``torch.autocast``, which calls this, unless it is disabled (in checkpoints)."""
        if sys._getframe(1).f_locals.get("enabled", True):
            refuse_autocast()
        return [torch.float16, torch.bfloat16]


def register_device(on_operator: OnOperator) -> torch.device:
    """Return a new device of fake tensors; `on_operator` is called after its operators.

    Raises:
        DeviceError: if another backend uses torch's PrivateUse1 device type.
    """
    mode = _mode()
    index = len(mode.callbacks)
    if index == _MAX_DEVICES:
        raise DeviceError(
            f"cannot set up another predicted device: a process has {_MAX_DEVICES} at most; "
            "run some tests in another process"
        )
    mode.callbacks[index] = on_operator
    return torch.device(DEVICE_TYPE, index)


@cache
def _mode() -> PredictingMode:
    """Return the only mode of this process; registering its device cannot be undone."""
    taken = privateuse1_backend_name()
    if taken != _UNUSED_NAME:
        raise DeviceError(
            "predict:cuda needs torch's PrivateUse1 device type, but it is taken by "
            f"{taken!r} in this process; run predicted tests in a process without that backend"
        )
    mode = PredictingMode()
    try:
        guard = Guard()
        set_up_python_backend(DEVICE_TYPE, backend_module=_Module(), device_guard=guard)
        _registrations.append(guard)
        install()
        _register_operators(mode)
        allow_foreach(FakeTensor)
    except RuntimeError as error:
        raise DeviceError(
            f"predict:cuda cannot set up its device in torch {torch.__version__}: {error}; use "
            "another torch version, for example 2.15"
        ) from error
    return mode


def _register_operators(mode: PredictingMode) -> None:
    """Run every operator of the device under `mode`."""

    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        with _modes_on(), mode:
            return func(*args, **kwargs)

    def copy_from(source: torch.Tensor, target: torch.Tensor, *_: object) -> torch.Tensor:
        run(target.copy_, source)
        return target

    everything, aten = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))
    everything.fallback(run, "PrivateUse1")
    # torch.tensor(..., device=...) needs this operator, and torch uses no fallback for it.
    aten.impl(COPY_FROM, copy_from, "PrivateUse1")
    _registrations.extend((everything, aten))
    _refuse_unsupported(mode)


def _refuse_unsupported(mode: PredictingMode) -> None:
    """Refuse what never reaches the mode as an operator, and would fail without a clear error."""
    plain_numpy = FakeTensor.numpy

    def numpy(tensor: FakeTensor, **options: Any) -> Any:
        return refuse_numpy() if tensor.fake_mode is mode else plain_numpy(tensor, **options)

    setattr(FakeTensor, "numpy", numpy)  # noqa: B010  # mypy rejects an assignment to a method
    callback_handler.register_start_callback(refuse_compiling)


_registrations: list[object] = []
"""Objects that torch uses without holding them; a registration ends when its object is freed."""


def _modes_on() -> Any:
    """Let modes see operators: ``torch.tensor(..., device=...)`` hides its own from them."""
    hidden = dispatch_keys_excluded()
    for key in (DispatchKey.Python, DispatchKey.PythonTLSSnapshot):
        hidden = hidden.remove(key)
    return ForceDispatchKeyGuard(dispatch_keys_included(), hidden)
