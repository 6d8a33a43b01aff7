"""Every private name of torch that the plugin uses, and a substitute if a torch version lacks it.

Those by which torch keeps tensors are in :mod:`.torch_keepers`; no other module may
use one. They exist from torch 2.9 to 2.15 but may be removed without notice:

- most are looked up once, and :data:`LOST` states what does not work without them;
- one is required: importing it raises an error with its name if it is missing;
- those of CUDA are looked up when a meter is created, because only some builds have them.
"""

import ctypes
import pkgutil
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import BuiltinFunctionType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters.patching import replaced

if TYPE_CHECKING:
    from torch.utils import _python_dispatch

    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    active_modes = _python_dispatch._get_current_dispatch_mode_stack
    pop_mode = _python_dispatch._pop_mode
    push_mode = _python_dispatch._push_mode

_NEEDED = {
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "active_modes": "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "pop_mode": "torch.utils._python_dispatch._pop_mode",
    "push_mode": "torch.utils._python_dispatch._push_mode",
}
"""The names in this module that the ledger of tensors requires -> their paths in torch."""


def __getattr__(name: str) -> Any:
    if name not in _NEEDED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return pkgutil.resolve_name(_NEEDED[name])
    except (ImportError, AttributeError) as error:
        raise DeviceError(
            f"measuring needs {_NEEDED[name]}, which torch {torch.__version__} lacks; "
            "use another torch version, for example 2.15"
        ) from error


LOST: list[str] = []
"""What cannot be measured with this torch version; part of the notes of its meters."""


def _found(path: str, instead: Any, lost: str = "") -> Any:
    """Return the object at a path in torch; if missing, record what is `lost`, return `instead`."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        if lost:
            LOST.append(f"torch {torch.__version__} has no {path}: {lost}")
        return instead


has_amx: Callable[[], bool] = _found("torch.cpu._is_amx_tile_supported", lambda: False)
"""Whether the processor multiplies tiles; kernels that use it need other scratch memory."""

# Contexts in which neither the user's tensor subclasses nor the user's modes see the meter's calls.
_Hidden = Callable[[], AbstractContextManager[object]]
no_torch_function: _Hidden = _found(
    "torch._C.DisableTorchFunction",
    nullcontext,
    "TorchFunctionModes that the user has enabled also see the calls that measure memory",
)
no_subclass_function: _Hidden = _found(
    "torch._C.DisableTorchFunctionSubclass",
    nullcontext,
    "__torch_function__ of tensor subclasses also sees the calls that measure memory",
)
no_dispatch: _Hidden = _found(
    "torch.utils._mode_utils.no_dispatch",
    nullcontext,
    "a view whose base was modified may be counted twice",
)


def _backward_on_stack() -> int:
    """Return 0 in a backward pass that this thread has called, otherwise -1."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_autograd = frame.f_globals.get("__name__") == "torch.autograd"
        if is_autograd and frame.f_code.co_name in ("backward", "grad"):
            return 0
        frame = frame.f_back
    return -1


graph_task_id: Callable[[], int] = _found(
    "torch._C._current_graph_task_id",
    _backward_on_stack,
    "in a backward pass on an accelerator, an older tensor that only C++ holds may be counted as "
    "newly allocated",
)
"""Returns -1 outside of backward passes."""


sequence_number: Callable[[], int] = _found(
    "torch.autograd._get_sequence_nr",
    lambda: 0,
    "a growing autograd graph without tensors is not named; gradients that are dropped may count",
)
"""Returns the number that autograd gives to the next node of this thread."""


def number_of_node(node: Any) -> int:
    """Return the number of an autograd node: newer nodes of a thread have higher ones.

    -1 if it has none, as the node of a Function whose graph has been freed.
    """
    try:
        number: int = node._sequence_nr()
    except (AttributeError, RuntimeError):
        return -1
    return number


is_tracing: Callable[[], bool] = _found(
    "torch._C._is_tracing", _found("torch.jit.is_tracing", lambda: False)
)
"""Whether ``torch.jit`` is tracing; the public function takes three times as long."""


def _weak_key(storage: torch.UntypedStorage) -> int:
    return int(StorageWeakRef(storage).cdata)


storage_key: Callable[[torch.UntypedStorage], int] = (
    attrgetter("_cdata") if _found("torch.UntypedStorage._cdata", None) else _weak_key
)
"""Returns what identifies a storage while it is live: its address in C++."""

_coo = _found("torch.Tensor._indices", None) and _found("torch.Tensor._values", None)
if not _coo:
    LOST.append("sparse tensors that are not coalesced are not counted: this torch has no _indices")
SPARSE_PARTS = ("_indices", "_values") if _coo else ("indices", "values")
"""Methods of a sparse COO tensor that return the tensors it consists of."""


def _never(_: torch.Tensor) -> bool:
    return False


is_lazy_clone: Callable[[torch.Tensor], bool] = _found(
    "torch._C._is_cow_tensor", _never, "reports copy lazy clones (torch._lazy_clone)"
)
"""Whether a tensor shares its data until one of those that share it is written or asked for its
address; raises NotImplementedError for a tensor without a storage."""

_is_wrapped = _found(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    _never,
    "reports do not name tensors that torch.func or torch.vmap has wrapped",
)
_unwrapped = _found("torch._C._functorch.get_unwrapped", None)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what a tensor wraps that ``torch.func`` or ``torch.vmap`` made; None for others."""
    inner = None
    while _unwrapped is not None and _is_wrapped(tensor):
        inner = tensor = _unwrapped(tensor)
    return inner


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of which `tensor` is a view for autograd; None if it is none."""
    try:
        return getattr(tensor, "_base", None)
    except RuntimeError:  # C++ code has given an undefined tensor to Python
        return None


TENSOR_HOOKS = tuple(
    name
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    if _found(
        f"torch.Tensor.{name}",
        None,
        "hints may mistake any dict that a tensor references for the dict of its hooks",
    )
)
"""Attributes of a tensor that contain its hooks."""
KNOWS_TENSOR_HOOKS = len(TENSOR_HOOKS) == 2
"""Whether these are all of them."""

TRACERS = ("trace", "trace_module") + (
    ("_get_trace_graph",)
    if _found("torch.jit._get_trace_graph", None, "torch.onnx may export wrong graphs in a region")
    else ()
)
"""Functions of ``torch.jit`` that trace; ``torch.onnx`` uses the last one."""

_device_constructors = _found("torch.utils._device._device_constructors", None)


def list_constructors() -> None:
    """Make torch list the functions to which a default device applies, with their true objects.

    It lists them once, when a default device is first used, which may be while some are replaced.
    """
    if _device_constructors is not None:
        _device_constructors()


_given_to_script: set[int] = set()
"""Identities of the functions of torch that :func:`keep_scriptable` has listed."""


def script_table() -> object:
    """Return the table of functions that ``torch.jit.script`` knows; None until it is used."""
    return getattr(sys.modules.get("torch.jit._builtins"), "_builtin_table", None)


def keep_scriptable(replacement: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Make ``torch.jit.script`` take `replacement` for `original`, one of its builtin functions.

    It lists its builtins when it is first used, which may be while `original` is replaced.
    """
    builtins = sys.modules.get("torch.jit._builtins")
    table = getattr(builtins, "_builtin_table", None)
    if table is None:
        if isinstance(original, BuiltinFunctionType) and id(original) not in _given_to_script:
            _given_to_script.add(id(original))
            getattr(builtins, "_builtin_ops", []).append((original, f"aten::{original.__name__}"))
    elif id(original) in table and id(replacement) not in table:
        table[id(replacement)] = table[id(original)]
        weakref.finalize(replacement, table.pop, id(replacement), None).atexit = False


_COMPILER_TABLES = (
    ("torch._dynamo.trace_rules", "get_torch_obj_rule_map"),
    ("torch._dynamo.variables.torch", "TorchInGraphFunctionVariable._get_handlers"),
)
"""Cached functions that return what ``torch.compile`` knows about functions, by the function."""


def keep_compilable(replacement: Any) -> None:
    """Let ``torch.compile`` know a function that was replaced, and is not any more.

    It lists functions when it is first used, which may be while `replacement`, made with
    ``functools.wraps``, is in the place of the original.
    """
    for module, path in _COMPILER_TABLES:
        listing: Any = sys.modules.get(module)
        if listing is None:  # as long as nothing is compiled
            return
        for name in path.split("."):
            listing = getattr(listing, name, None)
        if listing is not None and listing.cache_info().currsize:
            table = listing()
            if replacement in table:
                table.setdefault(replacement.__wrapped__, table[replacement])


use_count: Callable[[torch.Tensor], int] = _found(
    "torch.Tensor._use_count", lambda _: 0, "reports do not check if C++ uses a tensor too"
)
"""Returns how many references a tensor has in C++; one of them is that of its Python object."""
storage_use_count: Callable[[int], int] = _found(
    "torch._C._storage_Use_Count", lambda _: 0, "reports do not check if C++ uses a storage too"
)
"""Returns how many tensors and Python objects use the storage at an address in C++."""

BACKWARD_THREAD = "pt_autograd"
"""The start of the names of threads in which torch runs backward passes."""
RUN_BACKWARD: Any = _found(
    "torch.autograd.graph._engine_run_backward",
    None,
    "reports name no line of code for what a backward pass allocates on an accelerator",
)
"""The Python function in which a thread waits for the backward pass that it has started."""

SHOWS_SAVED = _found("torch._C._autograd.SavedTensor.data", None) is not None
"""Whether a saved tensor can be read without the user's unpack hook; not in torch 2.9."""


class _NoFunction:
    """Instead of the base of custom autograd functions, if torch has none of that name."""


FUNCTION_BASE: type = _found(
    "torch._C._FunctionBase",
    _NoFunction,
    "memory that is kept alive only by autograd Functions that are garbage counts as in use",
)
"""The base of the nodes of custom autograd functions."""

SAVED_TENSORS: tuple[type, ...] = tuple(
    saved for saved in (_found("torch._C._autograd.SavedTensor", None),) if saved and SHOWS_SAVED
)
"""The type of saved tensors that exist without a node; empty in torch 2.9, which has none."""

_SCRIPT = ("ScriptFunction", "ScriptList", "ScriptDict")
SCRIPT_TYPES = tuple(filter(None, (_found(f"torch._C.{name}", None) for name in _SCRIPT)))
"""Types of TorchScript, besides modules, that contain tensors in C++."""

SHARING = tuple(
    name
    for name in ("_share_fd_cpu_", "_share_filename_cpu_")
    if _found(
        f"torch.UntypedStorage.{name}",
        None,
        "tensors moved to shared memory (e.g. for worker processes) count as new allocations",
    )
)
"""Methods of a storage on the CPU that move it to shared memory, one for each strategy."""

LOADER_ITERATOR: Any = _found("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", None)
"""The type of iterators over a loader with workers."""

STATE_MAKER = "_init_group"
"""The method by which each optimizer of torch makes its state in its first step."""


def schema_of(operator: Any) -> Any:
    """Return an operator's schema: its arguments and results, and which of them it writes.

    Raises:
        DeviceError: if operators have none in this torch version.
    """
    try:
        return operator._schema
    except AttributeError as error:
        raise DeviceError(
            f"cannot read the arguments of {operator}: in torch {torch.__version__} operators have "
            "no _schema; use another torch version, for example 2.15"
        ) from error


def workspace_dropper(device_type: str) -> Callable[[], None] | None:
    """Return a function that drops cuBLAS workspaces, which ``empty_cache`` cannot drop.

    None if there is none; then workspaces show as retained by the first region.
    """
    return getattr(torch._C, "_cuda_clearCublasWorkspaces", None) if device_type == "cuda" else None


def device_stats() -> Callable[[int], Mapping[str, Any]] | None:
    """Return a function that reads a device's counters, nested; None if there is none."""
    return getattr(torch._C, "_accelerator_getDeviceStats", None)


_SNAPSHOT = "_cuda_memorySnapshot"
_NO_SUCH_POOL = (255, 255)
"""Of the two numbers of a pool, one is always 0."""


def allocator_settings(device_type: str) -> Mapping[str, Any]:
    """Return the allocator's settings as its snapshots have them; empty if they are not known."""
    snapshot = getattr(torch._C, _SNAPSHOT, None) if device_type == "cuda" else None
    if snapshot is None:
        return {}
    for arguments in ((*_NO_SUCH_POOL, False), _NO_SUCH_POOL):  # torch 2.9 takes two numbers
        for argument in arguments:
            # torch 2.14 gives back a reference to each that it was not given.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(argument))
        try:  # a pool without segments takes microseconds
            return dict(snapshot(arguments).get("allocator_settings", {}))
        except (RuntimeError, TypeError):
            continue
    return {}  # backend:cudaMallocAsync


def observe_out_of_memory(device_type: str, call: Callable[[int, int, int, int], None]) -> bool:
    """Call `call` whenever the allocator is about to raise an error because memory is missing.

    It gets the index of the device, and in bytes what was requested, the memory of the device and
    what of it is free. It cannot be removed again.

    Returns:
        False if this torch version or the allocator's backend has no such function.
    """
    attach = getattr(torch._C, f"_{device_type}_attach_out_of_memory_observer", None)
    if attach is None:
        return False
    try:
        attach(call)
    except RuntimeError:  # backend:cudaMallocAsync
        return False
    return True


class HistoryFunctions(NamedTuple):
    """Functions of ``torch.cuda.memory`` that record and write the history of blocks."""

    record: Callable[..., None]
    dump: Callable[[str], None]
    snapshot: Callable[[], Mapping[str, Any]]


def allocator_history(device_type: str) -> HistoryFunctions | None:
    """Return the allocator's history functions; None if it has none, so no snapshots exist."""
    memory = getattr(torch.get_device_module(device_type), "memory", None)
    names = ("_record_memory_history", "_dump_snapshot", "_snapshot")
    functions: list[Any] = [getattr(memory, name, None) for name in names]
    return None if None in functions else HistoryFunctions(*functions)


def records_history(device_type: str) -> bool:
    """Whether the history is being recorded; False if this torch version has no such function."""
    is_recorded = getattr(torch._C, f"_{device_type}_isHistoryEnabled", bool)
    return bool(is_recorded())


def on_history_call(device_type: str, function: Callable[[], None]) -> Callable[[], None]:
    """Call `function` before whatever starts or stops the recording; return what ends this.

    Code that has imported the function of ``torch.cuda.memory`` calls these by their names.
    """
    names = ("_record_memory_history", "_record_memory_history_legacy", "_recordMemoryHistory")
    undo = [
        replaced(torch._C, name, _calling_before(getattr(torch._C, name), function))
        for name in (f"_{device_type}{suffix}" for suffix in names)
        if hasattr(torch._C, name)
    ]

    def end() -> None:
        for each in undo:
            each()

    return end


def _calling_before(function: Callable[..., Any], call: Callable[[], None]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call()
        return function(*args, **kwargs)

    return wrapper


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether something is called before or after the forward of a module; False if unknown."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    return any(getattr(module, name, None) for name in names)
