"""References that the garbage collector does not see: of tensors, autograd nodes and NumPy arrays.

Also the references of C++ objects that contain tensors (futures, TorchScript with its optimized
code, DLPack capsules), the packed parameters of quantized modules, references that the collector
sees but cannot name, such as those of a ``threading.local``, and the keys by which meters identify
storages.
"""

import contextvars
import ctypes
import functools
import gc
import sys
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pytest_cka_memory.holders import Reference
from pytest_cka_memory.holders.search import RulesForType, TypeRules
from pytest_cka_memory.holders.tensors import class_module
from pytest_cka_memory.meters import torch_keepers, torch_private
from pytest_cka_memory.meters.objects import (
    PLAIN_TENSORS,
    grad_fn_of,
    gradient_of,
    is_node,
    mro,
    storages_of,
    with_subclasses,
)

_EVERY_ADDRESS = 2**46
"""A storage of so many bytes owns no memory: the emulated device has one that covers all addresses,
in which no block may be looked for."""
PACKED_ADVICE = (
    "delete the quantized module, and each container or hook that references it; it keeps "
    "its weight and bias packed in C++, in its attribute _packed_params"
)
PACKED_OWNER = (
    "the packed parameters of a quantized module (its attribute _packed_params; they are freed "
    "with the module)"
)
_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
SCRIPT_CONSTANT = ".get_debug_state() -> a constant of an optimized graph"
"""How to write the reference to such a constant: the graph has no short expression."""
_DATA_AT = {b"dltensor": 0, b"dltensor_versioned": 32}
"""Name of a DLPack capsule -> where the address of the data is in what it points to.

Source: ``dlpack.h`` 1.0, ``DLManagedTensor`` and ``DLManagedTensorVersioned`` with 8-byte pointers.
"""


def tensor_rules(blocks: Mapping[int, int] | None = None) -> RulesForType:
    """Return the rules for a search for storages: who has them, and what else is referenced.

    A storage has two keys, because some meters see storages and others the allocator's blocks: its
    own address in C++ and the address of its data. Both are addresses of live blocks of this
    process, so the keys of different storages never collide. A storage that uses parts of `blocks`,
    such as a part of a mapped file, has the addresses of those blocks as well.

    Args:
        blocks: the addresses of blocks of memory, and how many bytes each has.

    Returns:
        A function from a type to its rules; it returns None for a type of which the garbage
        collector sees all references.
    """
    keys_of_tensor, keys_of_storage = _key_functions(blocks or {})
    references_of_plain = _plain_references()
    tensor_types = with_subclasses(torch.Tensor)
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    of_cpp = _cpp_rules()
    plain = {
        torch.UntypedStorage: TypeRules(keys_of_storage),
        contextvars.Context: TypeRules(extra_references=_references_of_context),
        memoryview: TypeRules(extra_references=lambda view: [(".obj", view.obj)]),
    }

    def rules_for(kind: type) -> TypeRules | None:
        if kind in PLAIN_TENSORS:
            return TypeRules(keys_of_tensor, references_of_plain)
        if kind in tensor_types:
            return TypeRules(keys_of_tensor, _references_of_tensor)
        if is_node(kind):
            return _node_rules(kind)
        if array in mro(kind):
            return TypeRules(extra_references=lambda value: _references_of_array(value, array))
        if threading.local in mro(kind):
            return TypeRules(extra_references=_references_of_thread_local)
        return plain.get(kind) or of_cpp(kind)

    return rules_for


def _key_functions(
    blocks: Mapping[int, int],
) -> tuple[Callable[..., Collection[int]], Callable[..., Collection[int]]]:
    """Return the functions that return the keys of a tensor and of a storage.

    A search calls them for every tensor it meets, so what they need is looked up once.
    """
    from pytest_cka_memory.meters.torch_private import is_lazy_clone, storage_key

    meta = torch.device("meta")
    starts = sorted(blocks)

    def of_tensor(tensor: torch.Tensor) -> Collection[int]:
        storages = storages_of(tensor)
        try:
            if is_lazy_clone(tensor):  # to read the address of its data would copy the data
                return [storage_key(storage) for storage in storages]
        except (NotImplementedError, RuntimeError):  # it has no storage, or only its parts have
            pass
        if len(storages) == 1:
            # Most tensors are of a type whose storages are never fake.
            plain = type(tensor) in PLAIN_TENSORS
            return of_data(storages[0]) if plain else of_storage(storages[0])
        return [key for storage in storages for key in of_storage(storage)]

    def of_storage(storage: torch.UntypedStorage) -> Collection[int]:
        if storage.device == meta:  # of a fake tensor, too, which warns if its address is read
            return (storage_key(storage),)
        return of_data(storage)

    def of_data(storage: torch.UntypedStorage) -> Collection[int]:
        key = storage_key(storage)
        try:
            address = storage.data_ptr()
        except RuntimeError:  # it has been released
            return (key,)
        if not address:
            return (key,)
        size = storage.nbytes()
        if blocks.get(address, -1) >= size:  # as nearly all: it is one block
            return (key, address)
        first = bisect_right(starts, address)
        end = address + size if size < _EVERY_ADDRESS else address
        inside = starts[first : bisect_left(starts, end, first)]
        start = starts[first - 1] if first else 0
        if start < address < start + blocks.get(start, 0):
            inside.append(start)
        return (key, address, *inside)

    return of_tensor, of_storage


def _plain_references() -> Callable[[torch.Tensor], Iterable[tuple[str, Any]]]:
    """Return a function that does what :func:`_references_of_tensor` does, in a fifth of the time.

    Only for types of torch that override nothing. A search asks every live tensor, and most are
    not views, were not computed by autograd and have neither gradient nor hooks. Reading that of a
    tensor that is not a view runs no operator, so no mode needs to be off.
    """
    from pytest_cka_memory.meters.torch_private import TENSOR_HOOKS, base_of

    hooks, later_hooks = (*TENSOR_HOOKS, "grad", "grad")[:2]  # a version of torch may lack them

    def references(tensor: torch.Tensor) -> Iterable[tuple[str, Any]]:
        try:
            has_none = (
                base_of(tensor) is None
                and tensor.grad_fn is None
                and tensor.grad is None
                and getattr(tensor, hooks) is None
                and getattr(tensor, later_hooks) is None
            )
        except RuntimeError:  # as in grad_fn_of
            has_none = False
        return () if has_none else _references_of_tensor(tensor)

    return references


def _references_of_tensor(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:

    with torch_private.no_subclass_function():
        if (node := grad_fn_of(tensor)) is not None:
            yield ".grad_fn", node
        if (gradient := gradient_of(tensor)) is not None:
            yield ".grad", gradient
        for name in torch_private.TENSOR_HOOKS:
            if (hooks := getattr(tensor, name)) is not None:
                yield f".{name}", hooks
        if (base := torch_private.base_of(tensor)) is not None:
            yield "._base", base


def _node_rules(kind: type) -> TypeRules:
    """Return the rules for one type of autograd node: its inputs' nodes and saved tensors."""
    saved = torch_keepers.raw_saved(kind)
    is_leaf = "variable" in dir(kind)

    def references(node: Any) -> Iterator[tuple[str, Any]]:
        for index, (following, _) in enumerate(node.next_functions):
            if following is not None:
                yield f".next_functions[{index}][0]", following
        if is_leaf:
            yield ".variable", node.variable
        for name in saved:
            yield from _saved(node, name)

    return TypeRules(extra_references=references)


def _saved(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what is saved under `name`, not unpacked: unpacking would run the user's hooks."""
    plain = torch_keepers.unpacked_name(name)
    try:
        raw = getattr(node, name)
        several = isinstance(raw, tuple)
        for index, saved in enumerate(raw if several else (raw,)):
            place = f"[{index}]" if several else ""
            if not hasattr(saved, "data"):  # torch 2.9; delete this branch with support for it
                yield f".{plain}{place}", _unpacked(node, plain, index if several else None)
            elif saved.unpack_hook is not None:
                yield f".{name}{place}.data", saved.data
                yield f".{name}{place}.unpack_hook", saved.unpack_hook
            else:
                yield f".{plain}{place}", saved.data
    except RuntimeError:  # the backward pass has freed it
        return


def _unpacked(node: Any, name: str, index: int | None) -> Any:
    """Return what is saved under `name`, unpacked by the user's hook if any, for torch 2.9."""
    try:
        tensors = getattr(node, name)
        return tensors if index is None else tensors[index]
    except Exception:  # a user's hook that raises
        return None


def _references_of_array(array: Any, kind: Any) -> Iterator[tuple[str, Any]]:
    base = kind.base.__get__(array)
    if base is not None:
        yield ".base", base
    # An element of an array with fields is a new record, and not one of the objects in it.
    if kind.dtype.__get__(array).hasobject and not kind.dtype.__get__(array).names:
        for index, value in enumerate(kind.flat.__get__(array)):
            yield f".flat[{index}]", value


def _references_of_context(context: contextvars.Context) -> Iterator[tuple[str, Any]]:
    for variable, value in context.items():
        yield f"[<ContextVar {variable.name!r}>]", value


def _references_of_thread_local(local: threading.local) -> Iterator[tuple[str, Any]]:
    """Yield the dict of attributes of each thread; Python has no expression for it."""
    for threads in gc.get_referents(local):
        if type(threads) is dict:
            yield from ((".__dict__", names) for names in threads.values() if type(names) is dict)


def _cpp_rules() -> RulesForType:
    """Return the rules for objects of C++ that contain tensors; None for other types."""
    futures = with_subclasses(torch.futures.Future)
    script = {*with_subclasses(torch.jit.ScriptModule), *torch_private.SCRIPT_TYPES}

    def rules_for(kind: type) -> TypeRules | None:
        if kind in futures:
            return TypeRules(extra_references=_result_of_future)
        if kind in script:
            return TypeRules(extra_references=_references_of_script)
        if kind is torch.ScriptObject:
            return TypeRules(extra_references=_unpacked_parameters)
        if type(kind) is type and kind.__name__ == "PyCapsule":
            return TypeRules(_keys_of_capsule)
        return None

    return rules_for


def _result_of_future(future: Any) -> Iterator[tuple[str, Any]]:
    if future.done():
        try:
            yield ".value()", future.value()
        except Exception:  # it has an error instead of a value, which may be any exception
            return


def _keys_of_capsule(capsule: Any) -> Collection[int]:
    """Return the address of the tensor in a capsule of DLPack that nobody has used yet."""
    name = _name_of_capsule(capsule)
    if name not in _DATA_AT:
        return ()
    managed = _pointer_in_capsule(capsule, name)
    address = ctypes.c_void_p.from_address(managed + _DATA_AT[name]).value if managed else None
    return () if address is None else (address,)


_name_of_capsule: Any = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer_in_capsule: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _unpacked_parameters(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that the packed parameters of a quantized module keep as they are.

    Its ``unpack()`` returns the weight and the bias. What a library keeps in a layout of its own is
    copied by that: such a copy, which nothing else uses, is left out.
    """
    for index, tensor in enumerate(torch_keepers.packed_tensors(value)):
        if tensor is not None and torch_private.use_count(tensor) > 1:
            yield f".unpack()[{index}]", tensor


def leads_through_packed(path: Sequence[Reference]) -> bool:
    """Whether a path leads through packed parameters."""
    return any((reference.text or "").startswith(".unpack()") for reference in path)


@functools.cache
def has_packed_parameters() -> bool:
    """Whether a quantized module exists, whose packed parameters are in C++.

    Cached, because it looks at all objects and is asked for each storage. The end of a search
    empties the cache: ``has_packed_parameters.cache_clear()``.
    """
    kinds = set(map(type, gc.get_objects()))
    return any(class_module(kind).startswith(_MODULES) for kind in kinds)


def _references_of_script(value: Any) -> Iterator[tuple[str, Any]]:
    yield from torch_keepers.script_references(value)
    yield from _script_constants(value)


def _script_constants(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the constants in the code that ``torch.jit`` has optimized; only C++ references them.

    After a few calls TorchScript computes what does not depend on the inputs, and keeps it in a
    graph of its own beside the one that users read as ``function.graph``.

    Args:
        function: a function or module of TorchScript.
    """
    try:
        plans = list(function.get_debug_state().execution_plans.values())
    except (RuntimeError, AttributeError):  # it has no graph, or was never called
        return
    for plan in plans:
        for node in _nodes(plan.graph):
            if node.kind() == "prim::Constant" and _kind_of(node, "value") == "t":
                yield SCRIPT_CONSTANT, node.t("value")


def _nodes(block: Any) -> Iterator[Any]:
    """Yield the nodes of a graph or block, and of the graphs and blocks in them."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
        if _kind_of(node, "Subgraph") == "g":
            yield from _nodes(node.g("Subgraph"))


def _kind_of(node: Any, attribute: str) -> str:
    return str(node.kindOf(attribute)) if node.hasAttribute(attribute) else ""
