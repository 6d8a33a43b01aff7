"""A device of fake tensors: shapes, dtypes and storages without bytes, for code to run on.

The one place that touches private names of torch for it. PyTorch's spare device type (PrivateUse1)
is set up from Python; what arrives there goes on under a fake tensor mode. Tensors of other
devices are left alone, so data loaders and the rest of the process compute as ever.
"""

import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from pytest_cka_memory.births import callers, written
from pytest_cka_memory.errors import DeviceError, PredictionError

DEVICE_TYPE = "predicted"
"""What torch calls the device: ``predicted:0``."""
_UNTAKEN = "privateuseone"
_MOST_CARDS = 64

try:
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils.backend_registration import (
        _DummyBackendModule,
        _DummyPrivateUse1Hook,
        _setup_privateuseone_for_python_backend,
    )
except ImportError as error:
    raise DeviceError(
        f"predict:cuda needs a newer torch than {torch.__version__}: one where a device can be "
        "set up from Python, such as 2.15"
    ) from error

Seen = Callable[[Any, tuple[Any, ...], list[FakeTensor]], None]
"""Told of each operator: the operator, its arguments, and the predicted tensors it returned."""

# What fake tensors raise where the answer depends on values, or where no shape rule is known.
_UNKNOWABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
    NotImplementedError,
)


class _Module(_DummyBackendModule):  # type: ignore[misc]  # untyped in torch
    """``torch.predicted``, asked by torch itself and by code that is written for any device."""

    def device_count(self) -> int:
        return _MOST_CARDS

    def synchronize(self, device: object = None) -> None:
        """Nothing runs, so nothing is waited for."""

    def empty_cache(self) -> None:
        """A prediction empties its cache where it cleans."""


class _Hooks(_DummyPrivateUse1Hook):  # type: ignore[misc]  # untyped in torch
    """What torch's own code asks of the device type."""

    def is_available(self) -> bool:
        """Else ``torch.accelerator`` would take it for one: to wait for, to pin memory for."""
        return False


class _Mode(FakeTensorMode):
    """Runs operators on fake tensors, and tells of each once it has."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.seen: dict[int, Seen] = {}
        """Device index -> who is told."""
        self._inside = False
        self._lock = threading.RLock()  # a fake tensor mode itself is for one thread

    @property
    def avoid_device_init(self) -> bool:
        """Else the mode would start a device that has no start."""
        return True

    @avoid_device_init.setter
    def avoid_device_init(self, value: bool) -> None:
        pass

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with self._lock:
            if self._inside:  # an operator's shape rule, written in operators
                return super().__torch_dispatch__(func, types, args, kwargs)
            self._inside = True
            try:
                _refuse_lost_values(func, args, kwargs)
                result = super().__torch_dispatch__(func, types, args, kwargs)
            except _UNKNOWABLE as error:
                raise _unpredictable(func, error) from None
            finally:
                self._inside = False
                # What it refers to weakly, model.to() cannot swap.
                self.fake_tensor_converter.meta_converter.tensor_memo.clear()
            self._tell(func, args, result)
            return result

    def _tell(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        by_index: dict[int, list[FakeTensor]] = {}
        for tensor in _fakes_in(result):
            if tensor.fake_device.type == DEVICE_TYPE:
                by_index.setdefault(tensor.fake_device.index or 0, []).append(tensor)
        for index, tensors in by_index.items():
            if index not in self.seen:
                raise PredictionError(
                    f"{_where()}there is no {DEVICE_TYPE}:{index}; write cka_memory.device"
                )
            self.seen[index](func, args, tensors)

    def __deepcopy__(self, memo: object) -> "_Mode":
        """Copies of a tensor are of the same mode; ``copy.deepcopy(model)`` would copy it too."""
        return self


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
def _mode() -> _Mode:
    """The process's one mode, with the device registered; it cannot be taken back."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken != _UNTAKEN:
        raise DeviceError(
            f"torch's spare device type is taken by {taken!r} in this process; "
            "predict:cuda needs it, so run predicted tests in a process without that backend"
        )
    mode = _Mode()

    try:
        _setup_privateuseone_for_python_backend(
            DEVICE_TYPE, backend_module=_Module(), hook=_Hooks()
        )
        _route(mode)
    except RuntimeError as error:
        raise DeviceError(f"predict:cuda cannot set up its device: {error}") from error
    return mode


def _route(mode: _Mode) -> None:
    """Send every operator that reaches the device on, under `mode`."""

    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        with _modes_on(), mode:
            return func(*args, **kwargs)

    def copy_from(source: torch.Tensor, target: torch.Tensor, *_: object) -> torch.Tensor:
        return run(target.copy_, source)

    _keep.extend((torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")))
    _keep[0].fallback(run, "PrivateUse1")
    # The one that torch.tensor(..., device=...) needs, and for which torch asks no fallback.
    _keep[1].impl("_copy_from", copy_from, "PrivateUse1")


_keep: list[torch.library.Library] = []
"""Registrations end with the Python object that made them."""


def _modes_on() -> Any:
    """Let modes see operators again: ``torch.tensor(..., device=...)`` hides its own from them."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        hidden = hidden.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden)


def _fakes_in(value: Any) -> Iterator[FakeTensor]:
    if isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _fakes_in(one)


def _refuse_lost_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to write what has no value into a tensor that has: it would keep its old one."""
    written_to = [
        kwargs.get(argument.name) if argument.kwarg_only or at >= len(args) else args[at]
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for value in written_to:
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            raise PredictionError(
                f"{_where()}{func} writes a predicted tensor, which has no values, into a real "
                f"one on {value.device}; make the target on the predicted device too"
            )


def _unpredictable(func: Any, error: Exception) -> PredictionError:
    if isinstance(error, fake_tensor.DataDependentOutputException):
        why = "it needs a value, and predicted tensors have none"
        instead = "keep .item(), .tolist(), bool() and printing out of the region"
    elif isinstance(error, fake_tensor.DynamicOutputShapeException):
        why = "the shape of its result depends on values, and predicted tensors have none"
        instead = "write it with a fixed shape, e.g. torch.where(mask, x, y) for x[mask]"
    else:
        why = "its shapes are not known without running it"
        instead = "register one with torch.library.register_fake"
    name = func.name() if hasattr(func, "name") else func
    return PredictionError(
        f"{_where()}cannot predict {name}: {why}; {instead}, or measure this test on a device"
    )


def _where() -> str:
    """The user's line, as the start of a sentence."""
    lines = written(callers())
    return f"{lines[0]}: " if lines else ""
