"""Name the likely owner of an object that no Python name reaches, and how to free it.

An owner is recognized by the first object that C or C++ code holds, or, if there is no such object,
by what allocated the memory and by which libraries are in use.
"""

import functools
import gc
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.holders import ReferencePath, chains, growing, references, tensors
from pytest_cka_memory.holders.expressions import without_places
from pytest_cka_memory.holders.tensors import class_name
from pytest_cka_memory.holders.unreached import Unreached
from pytest_cka_memory.meters import torch_keepers, torch_private
from pytest_cka_memory.meters.objects import is_node, mro
from pytest_cka_memory.meters.torch_versions import KEEPS_WORKSPACES

_FIND_OUT = (
    "to find the owner, put cka_memory.measure() around one half of the block, then around "
    "one half of that, until one line is left: this line uses the owner"
)
_AUTOCAST = (
    "no Python object was found that keeps this memory alive; autocast caches the weights that it "
    "has cast until its block ends; measure around the block, or write torch.autocast(..., "
    "cache_enabled=False)"
)
_PERHAPS_AUTOCAST = (
    "autocast, which caches the weights that it has cast until its block ends (measure around the "
    "block, or write torch.autocast(..., cache_enabled=False))"
)
_NODE_HOOK = (
    "call handle.remove() for the hook of the autograd node, or let the hook use only its "
    "arguments; a hook that references the result keeps the graph alive, and the graph "
    "keeps the hook"
)
_METADATA = (
    "delete the entry from this dict (such as grad_fn.metadata of an autograd node), which C++ "
    "code keeps alive; an entry that references the tensor computed by the node keeps the whole "
    "graph alive"
)
_MODE = (
    "use the mode in a with statement, or call its __exit__(None, None, None); it was "
    "entered and not left, so torch keeps it"
)
_CALLBACK = (
    "unregister the function (atexit.unregister() for a callback of atexit), or complete "
    "what will call it, such as a Future; C code keeps the function to call it later"
)
_NODE = (
    "delete the result of this computation (e.g. the loss), or compute it in torch.no_grad(); only "
    "C++ code, no Python variable, keeps its autograd graph alive"
)


_CUBLAS = (
    "if the memory is a workspace of cuBLAS, which is kept for the next matrix product, call "
    "torch._C._cuda_clearCublasWorkspaces()"
)
_GRAPH_POOL = (
    "if the memory is in the pool of a CUDA graph, delete the graph or reset() it, then call "
    "torch.cuda.empty_cache()"
)
_COMPILED = (
    "call the function once before measuring; as long as the function exists, "
    "torch.compile keeps its compiled code and what the code's guards and constants "
    "reference ({} frees them)"
)
_UNOWNED = (
    "this memory belongs to no tensor that Python code can reach; it may be a library's "
    "workspace, or C++ code, such as an autograd graph, may hold it"
)


_POOL = (
    "no Python object was found that keeps this memory alive; {} may keep it; if torch.compile "
    f"has captured the graph, call torch.compiler.reset(); {_FIND_OUT}"
)


_IN_CPP = "no Python object was found that keeps this memory alive, so C++ code keeps it; {}"


_FREED_WITH_MODEL = (
    "the buckets are freed with the model; delete the model, its optimizer and its hooks"
)
_BUCKETS = (
    "no Python object was found that keeps this memory alive; DistributedDataParallel reduces "
    f"gradients in buckets, and {_FREED_WITH_MODEL}, or let the gradients be in the buckets with "
    "gradient_as_bucket_view=True"
)


_BY_CALL = {
    "jit.load(": (
        "delete the ScriptModule; it keeps the debug information of the file that torch.jit.load "
        "has read"
    ),
}
"""Calls that allocate memory which only C++ code holds -> who that is."""


class Owner(NamedTuple):
    """What holds a storage that no name leads to."""

    text: str | None
    """What is known about it; None if no object was found."""
    advice: str
    pattern: str
    """Equal for what has the same owner."""


def owner_of(unreached: Unreached, allocation: Allocation) -> Owner:
    """Return the owner of a storage whose holder no name leads to.

    Args:
        unreached: how the holder is kept alive.
        allocation: the storage.
    """
    path = chains.path_text(unreached.path)
    if unreached.loop:
        loop = f"the loop {chains.loop_text(unreached.loop)}"
        rest = f"; from there {path}" if len(unreached.path) > 1 else ""
        return Owner(f"{loop}{rest}", chains.loop_advice(unreached.loop), without_places(loop))
    if is_cast_by_autocast(allocation):
        return Owner(None, _AUTOCAST, "")
    for words, advice, fits in _KINDS:
        if fits(unreached.path):
            return Owner(f"{words}: {path}", advice or compiled(), words)
    # The tensors of earlier batches are farther away in one graph, which is one owner.
    head = growing.head_in_c_code(unreached.path)
    pattern = without_places(path) if head is None else f"graph {id(head)}"
    return Owner(
        f"C or C++ code, which references {path}",
        _possible(allocation, unreached.path[0].value),
        pattern,
    )


def without_object(allocation: Allocation) -> str:
    """Return what may hold a storage that no Python object has, and how to find out.

    The most certain comes first: each following guess needs less to be known.
    """
    if allocation.pool is not None:
        return _POOL.format(allocation.pool)
    if is_cast_by_autocast(allocation):
        return _AUTOCAST
    if (maker := maker_of(allocation)) is not None:
        return maker
    if is_in_buckets(allocation):
        return _BUCKETS
    if allocation.may_be_unowned and not autocast_is_caching():
        return unowned()
    return _IN_CPP.format(_possible(allocation))


def maker_of(allocation: Allocation) -> str | None:
    """Return who holds a storage that a function of torch keeps for itself; None if none does."""
    site = allocation.site
    expression = "" if site is None else site.expression or site.code or ""
    return next((text for call, text in _BY_CALL.items() if call in expression), None)


def is_in_buckets(allocation: Allocation) -> bool:
    """Whether C++ code made a storage, and a DistributedDataParallel has a bucket of its size."""
    kind = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
    is_of_operator = allocation.site is not None and allocation.site.operator is not None
    if kind is None or is_of_operator or not _is_distributed():
        return False
    models = [it for it in gc.get_objects() if issubclass(type(it), kind)]
    return any(allocation.bytes in sizes for sizes in map(_bucket_sizes, models))


def _bucket_sizes(model: Any) -> Sequence[int]:
    """Return the bytes of each bucket, as the allocator rounds them."""
    return [
        rounded
        for size in torch_keepers.bucket_sizes(model)
        for rounded in (size, -(-size // _ROUNDED) * _ROUNDED)
    ]


_ROUNDED = 512
"""The allocator of CUDA rounds sizes up to a multiple of this."""


def _is_distributed() -> bool:

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def unowned() -> str:
    """Return what may hold bytes that belong to no tensor that Python knows."""
    kinds = [_UNOWNED]
    if torch_keepers.uses_cuda():
        if KEEPS_WORKSPACES:
            kinds.append(_CUBLAS)
        kinds.append(_GRAPH_POOL)
    return f"{'; '.join(kinds)}; {_FIND_OUT}"


def is_cast_by_autocast(allocation: Allocation) -> bool:
    """Whether autocast made a storage, as far as is known, and still caches what it casts."""
    operator = None if allocation.site is None else allocation.site.operator
    return operator == "aten._to_copy" and autocast_is_caching()


def autocast_is_caching() -> bool:
    """Whether this thread is in a block of autocast, at whose end torch empties its cache."""
    # torch has no function that only reads how many blocks of autocast are open.
    torch.autocast_increment_nesting()
    blocks: int = torch.autocast_decrement_nesting()
    return blocks > 0 and torch.is_autocast_cache_enabled()


def compiled() -> str:
    """Return how to free the storages that code made by ``torch.compile`` holds."""
    return _COMPILED.format(torch_keepers.RESET_COMPILER)


def is_compiled(path: ReferencePath) -> bool:
    """Whether a path leads through an object of ``torch.compile``."""
    return any(
        tensors.module_name_of(reference.value).startswith(torch_keepers.COMPILER_PACKAGES)
        for reference in path
    )


def _checkpoint(path: ReferencePath) -> bool:
    return any(
        tensors.module_name_of(reference.value) == chains.CHECKPOINT_MODULE for reference in path
    )


def _mode(path: ReferencePath) -> bool:
    names = {class_name(kind) for kind in mro(type(path[0].value))}
    return bool(names & {"TorchFunctionMode", "TorchDispatchMode"})


def _hooks_of_node(path: ReferencePath) -> bool:
    first = path[0].value
    if type(first) is not OrderedDict or len(path) < 2:
        return False
    return all(type(key) is int for key in OrderedDict.keys(first))


def _metadata(path: ReferencePath) -> bool:
    return type(path[0].value) is dict and len(path) > 1


def _callback(path: ReferencePath) -> bool:
    value = path[0].value
    if type(value) is tuple and len(value) == 3:
        value = value[0]  # from Python 3.14, atexit keeps each function with its arguments
    return issubclass(type(value), (types.FunctionType, types.MethodType, functools.partial))


def _node(path: ReferencePath) -> bool:
    return is_node(type(path[0].value))


_KINDS: Sequence[tuple[str, str, Callable[[ReferencePath], bool]]] = (
    ("code that torch.compile made", "", is_compiled),
    ("a mode that is active", _MODE, _mode),
    ("torch.utils.checkpoint", chains.CHECKPOINT_ADVICE, _checkpoint),
    ("the hooks of an autograd node", _NODE_HOOK, _hooks_of_node),
    ("a dict of C++ code", _METADATA, _metadata),
    ("a function that C code will call", _CALLBACK, _callback),
    ("an autograd graph", _NODE, _node),
)
"""Kinds of owners: in words, what to do, and whether a path begins at one."""


def _possible(allocation: Allocation, holder: Any = None) -> str:
    """Return which kinds of owners are possible, and how to find out which it is.

    Args:
        allocation: what is held.
        holder: the object that C or C++ code references, if one was found.
    """
    operator = None if allocation.site is None else allocation.site.operator
    kinds = [_PERHAPS_AUTOCAST] if operator is None and autocast_is_caching() else []
    kinds.append("an autograd graph of which no Python object has the result")
    if not torch_private.SHOWS_SAVED and (
        holder is None or not issubclass(type(holder), torch.UntypedStorage)
    ):
        kinds.append("a hook of saved_tensors_hooks that returns the tensor itself")
    if torch_keepers.has_compiled():
        kinds.append(
            f"a constant of code that torch.compile made ({torch_keepers.RESET_COMPILER} frees it)"
        )
    if references.has_packed_parameters():
        kinds.append(references.PACKED_OWNER)
    if _is_distributed():
        kinds.append(f"the buckets of DistributedDataParallel ({_FREED_WITH_MODEL})")
    return f"this may be {', or '.join(kinds)}; {_FIND_OUT}"
