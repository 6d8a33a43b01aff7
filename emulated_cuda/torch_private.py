"""Every private name of torch that the emulated device uses.

No other module of this package may use one. :func:`missing` names what a torch version lacks of
those without which no values can be computed.
"""

import contextlib
import ctypes
import inspect
import json
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache, wraps
from typing import Any

import torch

from emulated_cuda import this_process, torch_versions


def missing() -> list[str]:
    """Return the paths of names without which values cannot be computed."""
    return [path for path in torch_versions.NEEDED_NAMES.value if not _exists(path)]


def _exists(path: str) -> bool:
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


def registered(dispatch_key: str) -> list[str]:
    """Return the names of all operators that have a kernel for a dispatch key."""
    return list(torch._C._dispatch_get_registrations_for_dispatch_key(dispatch_key))


def operator_of(name: str) -> Any:
    """Return the operator of a name such as ``aten::add.Tensor``; None if there is none."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return None


@contextlib.contextmanager
def unreported_overrides() -> Iterator[None]:
    """Let kernels be put before torch's own without the warning that versions up to 2.12 give."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=torch_versions.OVERRIDE_WARNING.value)
        yield


def put_before(library: Any, name: str, kernel: Any, key: str) -> None:
    """Register a kernel that gets the dispatch keys and runs before torch's own.

    Args:
        library: of :class:`torch.library.Library`.
        name: of the operator, without its namespace.
        kernel: what is called.
        key: the dispatch key.
    """
    library.impl(name, kernel, key, with_keyset=True, **_override_arguments())


@cache
def _override_arguments() -> Mapping[str, bool]:
    # Torch before 2.8 has no such argument, and no check that it would switch off.
    named = inspect.signature(torch.library.Library.impl).parameters
    return {"allow_override": True} if "allow_override" in named else {}


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator."""
    return operator._schema


def schema_by_name(name: str) -> Any:
    """Return the schema of the operator with a name such as ``aten::add.Tensor``; None if none has.

    In torch versions with the function for it, this makes no object of the operator, which takes
    ten times as long.
    """
    find = getattr(torch._C, "_get_schema", None)
    if find is None:
        operator = operator_of(name)
        return None if operator is None else schema_of(operator)
    base, _, overload = name.partition(".")
    try:
        return find(base, overload)
    except RuntimeError:
        return None


def excluded_keys(names: Iterable[str]) -> Any:
    """Return a set of dispatch keys for :func:`without_keys`."""
    key_set = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    for name in names:
        key = torch._C.DispatchKey.__members__.get(name)
        if key is not None:
            key_set = key_set | torch._C.DispatchKeySet(key)
    return key_set


def without_keys(keys: Any) -> AbstractContextManager[object]:
    """Return a context in which this thread's dispatcher skips these keys."""
    guard: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


def without_torch_function() -> AbstractContextManager[object]:
    """Return a context in which the user's subclasses and function modes see no call."""
    guard: AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return guard


def without_modes() -> AbstractContextManager[object]:
    """Return a context in which the user's dispatch modes see no operator."""
    guard: AbstractContextManager[object] = torch._C._DisableTorchDispatch()
    return guard


conjugated: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, "_conj", torch.conj)
negated: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, "_neg_view", torch.neg)


def never_compiled(kernels: Iterable[Callable[..., Any]]) -> None:
    """Keep ``torch.compile`` from compiling kernels and what they call.

    After a graph break, torch calls kernels in Python while Dynamo compiles every new frame.
    """
    frames = getattr(torch._C._dynamo, "eval_frame", None)
    names = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
    set_strategy, strategy, action = (getattr(frames, name, None) for name in names)
    if not (set_strategy and strategy and action):
        return
    for code in {getattr(kernel, "__code__", None) for kernel in kernels} - {None}:
        set_strategy(code, strategy(action.SKIP, action.SKIP))


SPARSE_PARTS = (
    "_coalesced_",
    "_dimI",
    "_dimV",
    "_indices",
    "_nnz",
    "_sparse_compressed_tensor_unsafe",
    "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_values",
    "ccol_indices",
    "col_indices",
    "copy_",
    "copy_sparse_to_sparse_",
    "crow_indices",
    "dense_dim",
    "empty",
    "empty_like",
    "indices",
    "is_coalesced",
    "resize_as_sparse_",
    "row_indices",
    "select",
    "sparse_dim",
    "sparse_resize_",
    "sparse_resize_and_clear_",
    "unsqueeze",
    "values",
    "zero_",
    "zeros",
)
"""Operators that only create, copy or return the parts of a sparse tensor, which are dense."""


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values of a sparse COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def compressed_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outer and the inner indices of a tensor in a compressed layout."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


def nested_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the buffer of a nested tensor, and its sizes, strides and offsets on the CPU."""
    shape = (
        tensor._nested_tensor_size(),
        tensor._nested_tensor_strides(),
        tensor._nested_tensor_storage_offsets(),
    )
    return tensor.values(), shape


def nested_from_parts(values: torch.Tensor, shape: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the nested tensor with a buffer and what :func:`nested_parts` returned."""
    return torch._nested_view_from_buffer(values, *shape)


def empty_quantized_like(
    tensor: torch.Tensor, on_device: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return an empty quantized tensor with the type, scales and zero points of another.

    ``on_device`` gets scales and zero points, and returns those to use.
    """
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return torch._empty_affine_quantized(
            (0,), scale=tensor.q_scale(), zero_point=tensor.q_zero_point(), dtype=tensor.dtype
        )
    return torch._empty_per_channel_affine_quantized(
        tensor.size(),
        scales=on_device(tensor.q_per_channel_scales()).clone(),
        zero_points=on_device(tensor.q_per_channel_zero_points()).clone(),
        axis=tensor.q_per_channel_axis(),
        dtype=tensor.dtype,
    )


QUANTIZED_PARTS = (
    *("_empty_affine_quantized", "_empty_per_channel_affine_quantized", "empty_quantized"),
    *("empty", "empty_like", "empty_strided", "set_", "qscheme", "q_scale", "q_zero_point"),
    *("q_per_channel_axis", "q_per_channel_scales", "q_per_channel_zero_points"),
)
"""Operators that only create a quantized tensor, or return how it is quantized."""


NESTED_PARTS = (
    *("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets"),
    *("_fused_sdp_choice", "_scaled_dot_product_cudnn_attention", "is_same_size", "values"),
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    *("_to_copy", "clone", "copy_", "empty_like", "matmul", "matmul_backward", "normal_"),
    *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
)
"""Operators that return the parts of a nested tensor, or only call others for it."""


def disable_fusion() -> None:
    """Keep TorchScript from launching kernels of its own for several operators at once."""
    disable = getattr(torch._C, "_jit_override_can_fuse_on_gpu", None)
    if disable is not None:
        disable(False)


def call_around_replays(around: Callable[..., Any]) -> None:
    """Call `around` with the function that replays a CUDA graph and its arguments, in its place."""
    replay = torch.cuda.CUDAGraph.replay

    def replay_within(self: Any) -> Any:
        return around(replay, self)

    torch.cuda.CUDAGraph.replay = replay_within  # type: ignore[method-assign]


def is_singular(error: Exception) -> bool:
    """Whether an error says that a matrix has no such decomposition, as a card would say too."""
    return type(error).__name__ == torch_versions.SINGULAR.value


def call_before_peak_resets(function: Callable[[], None]) -> None:
    """Call `function` before the program resets the peak of a device's memory.

    Where torch has no such functions, nothing is called.
    """
    for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
        reset = getattr(torch._C, name, None)
        if reset is not None:
            setattr(torch._C, name, _after(function, reset))


def call_when_memory_is_refused(function: Callable[[int, int, int, int], None]) -> None:
    """Call `function` just before torch raises an error because memory of a device is missing.

    It gets the index of the device, and in bytes what was requested, the memory of the device and
    what of it is free. Where torch has no such function, nothing is called.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:  # it would initialize the device, which a program may not want yet
        torch.cuda._lazy_call(lambda: attach(function))


def _after(first: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def call_both(*args: Any) -> Any:
        first()
        return function(*args)

    return call_both


def measure_no_kernels(module: str) -> None:
    """Let a module of Inductor take its first choice where it would measure kernels.

    Times of the emulated device say nothing, and what Inductor allocates to measure them would be
    in the user's figures as long as its caches on disk are cold.

    Args:
        module: one of those in ``torch_versions.MEASURING``, which is imported now.
    """
    for owner, method, replacement in (
        ("CachingAutotuner", "bench", _same_time),
        ("AlgorithmSelectorCache", "make_benchmark_fn", _prefer_library),
        ("AlgorithmSelectorCache", "make_precompile_fn", _no_precompilation),
    ):
        owner_class = getattr(sys.modules[module], owner, None)
        if getattr(owner_class, "__module__", None) == module and hasattr(owner_class, method):
            setattr(owner_class, method, replacement)


def _same_time(*args: Any, **kwargs: Any) -> float:
    return 1.0


def _prefer_library(*args: Any, **kwargs: Any) -> Callable[[Iterable[Any]], dict[Any, float]]:
    """Return what tells Inductor that kernels of libraries are faster than its templates."""
    return lambda choices: {
        choice: 1.0 if type(choice).__name__ == torch_versions.LIBRARY_CHOICE.value else 2.0
        for choice in choices
    }


def _no_precompilation(*args: Any, **kwargs: Any) -> Callable[[], None]:
    return lambda: None


def refuse_packages(text: str) -> None:
    """Let AOTInductor, whose module is imported now, raise an error for a model on the device.

    Args:
        text: of the error.
    """
    module, name = torch_versions.PACKAGING.value
    compile_model = getattr(sys.modules[module], name, None)
    if compile_model is None:
        return

    @wraps(compile_model)
    def compile_or_refuse(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (*inputs, *model.parameters(), *model.buffers())
        if any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors):
            raise NotImplementedError(text)
        return compile_model(model, inputs, *args, **kwargs)

    setattr(sys.modules[module], name, compile_or_refuse)


def label_profiles(text: str) -> None:
    """Write `text` below the tables of torch's profiler, and into the traces that it exports."""
    from torch.autograd.profiler_util import EventList
    from torch.profiler import profiler

    table: Callable[..., str] = EventList.table
    add_metadata: Callable[..., None] = profiler._KinetoProfile.add_metadata_json
    begin: Callable[[Any], None] = profiler._KinetoProfile.start_trace

    def labelled_table(self: Any, *args: Any, **kwargs: Any) -> str:
        return f"{table(self, *args, **kwargs)}{text}\n"

    def start_labelled(self: Any) -> None:
        begin(self)
        add_metadata(self, "emulated_cuda", json.dumps(text))

    setattr(EventList, "table", labelled_table)  # noqa: B010 - mypy refuses an assignment
    setattr(profiler._KinetoProfile, "start_trace", start_labelled)  # noqa: B010


def raw_allocator() -> tuple[Callable[[int, int], int], Callable[[int], None]]:
    """Return two functions: bytes and a stream's pointer -> a pointer, and what frees it.

    They are the public ``torch.cuda.caching_allocator_alloc`` and ``caching_allocator_delete``
    without a change of the current device, which takes ten times as long as the allocation.
    """
    names = ("_cuda_cudaCachingAllocator_raw_alloc", "_cuda_cudaCachingAllocator_raw_delete")
    if all(hasattr(torch._C, name) for name in names):
        allocate, free = (getattr(torch._C, name) for name in names)
        return allocate, free
    allocate = torch.cuda.caching_allocator_alloc
    return (lambda size, stream: allocate(size, stream=stream)), torch.cuda.caching_allocator_delete


def set_allocator_settings(text: str) -> None:
    """Set what ``PYTORCH_ALLOC_CONF`` would set, in a process that has begun already.

    Raises:
        RuntimeError: if torch does not know a setting, or cannot change it any more.
    """
    for name in (
        "_accelerator_setAllocatorSettings",
        "_cuda_cudaCachingAllocator_set_allocator_settings",  # before torch 2.10
    ):
        if hasattr(torch._C, name):
            getattr(torch._C, name)(text)
            return
    torch.cuda.memory._set_allocator_settings(text)


def segment_counter() -> ctypes.c_int32 | None:
    """Return the variable in which torch's allocator counts segments; None if it has none.

    Since torch 2.13 (pytorch#183591) it takes, of free blocks of one size, that of the segment with
    the lowest number. Torch 2.12 numbers each block, also one that is split off, so that no numbers
    of ours give an order. Before, it took the one at the lowest address.
    """
    if torch.__version__ < "2.13":
        return None
    for static in ("L", ""):  # since torch 2.14 its name has internal linkage
        name = f"_ZN3c104cuda20CUDACachingAllocator6Native{static}27registration_counter_globalE"
        address = this_process.address_of_variable(
            "libc10_cuda.so", name, ctypes.sizeof(ctypes.c_int32)
        )
        if address is not None:
            return ctypes.c_int32.from_address(address)
    return None


_MOST_HISTORY_ENTRIES = 5_000_000


def record_history_when_initialized() -> None:
    """Record what the allocator does from the moment at which the program first uses a device.

    Without stacks of C++, whose names take minutes to find for a million of them.
    """

    def record() -> None:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_HISTORY_ENTRIES, stacks="python")

    torch.cuda._lazy_call(record)


def history() -> dict[str, Any]:
    """Return what was recorded, as ``torch.cuda.memory._dump_snapshot`` writes it."""
    return dict(torch.cuda.memory._snapshot())


def let_scripts_call(function: Any, instead_of: Any) -> None:
    """Let ``torch.jit.script`` take a function for the built-in one that it replaces."""
    torch.jit._builtins._register_builtin(function, torch.jit._builtins._find_builtin(instead_of))
