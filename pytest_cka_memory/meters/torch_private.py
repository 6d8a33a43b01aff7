"""Every private name of torch that the plugin uses, and what stands in where a torch has none.

No other module may name one. They were there from torch 2.9 to 2.15, but may go without a word:

- most are looked up once, and what it costs to lack one is told in :data:`LOST`;
- a few are needed: to import one that is not there raises, naming it and torch's version;
- those of CUDA are looked up when a meter is made, as only some builds have them.
"""

import pkgutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cka_memory.errors import DeviceError

if TYPE_CHECKING:
    from torch._subclasses import fake_tensor
    from torch.utils import _python_dispatch, backend_registration

    # Those of the names below that are types.
    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    FakeTensor = fake_tensor.FakeTensor
    FakeTensorMode = fake_tensor.FakeTensorMode
    BackendModule = backend_registration._DummyBackendModule
    DeviceGuard = backend_registration._DummyDeviceGuard

_FAKE = "torch._subclasses.fake_tensor"
_NEEDED = {
    "measuring": {"TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode"},
    "predict:cuda": {
        "FakeTensor": f"{_FAKE}.FakeTensor",
        "FakeTensorMode": f"{_FAKE}.FakeTensorMode",
        "NeedsValueError": f"{_FAKE}.DataDependentOutputException",
        "NeedsShapeError": f"{_FAKE}.DynamicOutputShapeException",
        "UnknownShapesError": f"{_FAKE}.UnsupportedOperatorException",
        "UnfakeableError": f"{_FAKE}.UnsupportedFakeTensorException",
        "in_kernel": f"{_FAKE}.in_kernel_invocation_manager",
        "callback_handler": "torch._dynamo.callback.callback_handler",
        "BackendModule": "torch.utils.backend_registration._DummyBackendModule",
        "DeviceGuard": "torch.utils.backend_registration._DummyDeviceGuard",
        "set_up_python_backend": (
            "torch.utils.backend_registration._setup_privateuseone_for_python_backend"
        ),
        "DeviceType": "torch._C._autograd.DeviceType",
        "DispatchKey": "torch._C.DispatchKey",
        "ForceDispatchKeyGuard": "torch._C._ForceDispatchKeyGuard",
        "dispatch_keys_excluded": "torch._C._dispatch_tls_local_exclude_set",
        "dispatch_keys_included": "torch._C._dispatch_tls_local_include_set",
        "privateuse1_backend_name": "torch._C._get_privateuse1_backend_name",
        "run_backward": "torch.autograd.graph._engine_run_backward",
        "storage_of_weak": "torch.UntypedStorage._new_with_weak_ptr",
    },
}
"""What cannot be done -> by which names, and torch's names for them, without which."""


def __getattr__(name: str) -> Any:
    for purpose, paths in _NEEDED.items():
        if name in paths:
            try:
                return pkgutil.resolve_name(paths[name])
            except (ImportError, AttributeError) as error:
                raise DeviceError(
                    f"{purpose} needs a torch that has {paths[name]}, as 2.15 has; "
                    f"this is torch {torch.__version__}"
                ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


LOST: list[str] = []
"""What cannot be told with this torch; the CPU's and accelerators' reports show it."""


def _found(path: str, instead: Any, lost: str = "") -> Any:
    """A name of torch's, or `instead` of it; what is `lost` then is noted."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        if lost:
            LOST.append(f"torch {torch.__version__} has no {path}: {lost}")
        return instead


# Questions of ours that neither the user's subclasses nor modes are to see.
_Unseen = Callable[[], AbstractContextManager[object]]
no_torch_function: _Unseen = _found(
    "torch._C.DisableTorchFunction", nullcontext, "the user's modes see what the meter asks"
)
no_subclass_function: _Unseen = _found(
    "torch._C.DisableTorchFunctionSubclass",
    nullcontext,
    "subclasses of tensors see what the meter asks, and may answer as they like",
)
no_dispatch: _Unseen = _found(
    "torch.utils._mode_utils.no_dispatch",
    nullcontext,
    "a view whose base was changed may count anew when the meter looks at it",
)


def _pass_below() -> int:
    """0 in a backward pass that this thread has called, else -1."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_autograd = frame.f_globals.get("__name__") == "torch.autograd"
        if is_autograd and frame.f_code.co_name in ("backward", "grad"):
            return 0
        frame = frame.f_back
    return -1


graph_task_id: Callable[[], int] = _found(
    "torch._C._current_graph_task_id",
    _pass_below,
    "what only C++ held may count as born in an accelerator's backward pass",
)
"""-1 outside of backward passes."""


is_tracing: Callable[[], bool] = _found(
    "torch._C._is_tracing", _found("torch.jit.is_tracing", lambda: False)
)
"""Whether ``torch.jit`` traces; its public name takes three times as long."""


def _weak_key(storage: torch.UntypedStorage) -> int:
    return int(StorageWeakRef(storage).cdata)


storage_key: Callable[[torch.UntypedStorage], int] = (
    attrgetter("_cdata") if _found("torch.UntypedStorage._cdata", None) else _weak_key
)
"""What tells storages apart while they live: where C++ keeps them."""

_coo = _found("torch.Tensor._indices", None) and _found("torch.Tensor._values", None)
if not _coo:
    LOST.append("sparse tensors that are not coalesced are not counted: this torch has no _indices")
SPARSE_PARTS = ("_indices", "_values") if _coo else ("indices", "values")
"""Methods of a sparse tensor in COO layout that return what it consists of."""


def _always(_: torch.Tensor) -> bool:
    return True


is_view: Callable[[torch.Tensor], bool] = _found(
    "torch.Tensor._is_view", _always, "hints call every part of a larger storage a view"
)

TENSOR_HOOKS = tuple(
    name
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    if _found(f"torch.Tensor.{name}", None, "what its hooks hold is told without their name")
)
"""Attributes of a tensor that hold its hooks."""

TRACERS = ("trace", "trace_module") + (
    ("_get_trace_graph",)
    if _found("torch.jit._get_trace_graph", None, "torch.onnx may trace code wrongly in a region")
    else ()
)
"""Functions of ``torch.jit``; the last is that of ``torch.onnx``."""

innermost_mode = _found("torch.utils._python_dispatch._get_current_dispatch_mode", None)
pop_mode = _found("torch.utils._python_dispatch._pop_mode", None)
push_mode = _found("torch.utils._python_dispatch._push_mode", None)
TELLS_MODES = None not in (innermost_mode, pop_mode, push_mode)
"""Whether these three may be called: dispatch modes are known, and can be put in another order."""
if not TELLS_MODES:
    LOST.append(
        f"torch {torch.__version__} does not tell which dispatch modes are on: torch.jit may trace "
        "wrongly in a region, and a mode that a test leaves on is taken off for the meter's"
    )

BACKWARD_THREAD = "pt_autograd"
"""How the names of threads begin in which torch runs backward passes."""
COPY_FROM = "_copy_from"
"""The operator of aten that a backend must bring; to register it raises where there is none."""
_RAW_SAVED = "_raw_saved_"


def raw_saved(kind: type) -> list[str]:
    """Attributes of an autograd node that hold what it saved, unopened.

    Without them, those that hold it have no name: they are told as no Python holder.
    """
    return [name for name in dir(kind) if name.startswith(_RAW_SAVED)]


def opened(raw: str) -> str:
    """The attribute by which users see what is saved under a raw one."""
    return "saved_tensors" if raw == f"{_RAW_SAVED}tensors" else raw.replace("_raw", "", 1)


def schema_of(operator: Any) -> Any:
    """An operator's arguments and results, and which of them it writes.

    Raises:
        DeviceError: where operators do not tell.
    """
    try:
        return operator._schema
    except AttributeError as error:
        raise DeviceError(
            f"cannot tell what {operator} takes: in torch {torch.__version__} operators have no "
            "_schema, as in 2.15"
        ) from error


def set_run_backward(function: Callable[..., Any]) -> None:
    """Have every backward pass run by `function`."""
    for module in (torch.autograd, torch.autograd.graph):
        setattr(module, "_engine_run_backward", function)  # noqa: B010


def workspace_dropper(device_type: str) -> Callable[[], None] | None:
    """How to drop the workspaces of cuBLAS, which ``empty_cache`` cannot.

    Where there is no way they stay, and show as retained by the first region.
    """
    return getattr(torch._C, "_cuda_clearCublasWorkspaces", None) if device_type == "cuda" else None


class AllocatorHistory(NamedTuple):
    """What ``torch.cuda.memory`` notes of its blocks."""

    record: Callable[..., None]
    dump: Callable[[str], None]
    snapshot: Callable[[], Mapping[str, Any]]


def allocator_history(device_type: str) -> AllocatorHistory | None:
    """The allocator's history; None where it keeps none, and then no snapshots can be had."""
    memory = getattr(torch.get_device_module(device_type), "memory", None)
    names = ("_record_memory_history", "_dump_snapshot", "_snapshot")
    found: list[Any] = [getattr(memory, name, None) for name in names]
    return None if None in found else AllocatorHistory(*found)
