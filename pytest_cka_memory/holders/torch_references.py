"""References that the garbage collector does not see: of tensors, autograd nodes and NumPy arrays.

Also references that it sees but cannot name, such as those of a ``threading.local``, and the keys
by which meters identify storages.
"""

import contextvars
import gc
import sys
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.holders.cpp_references import cpp_rules
from pytest_cka_memory.holders.search import RulesForType, TypeRules
from pytest_cka_memory.meters.autograd_nodes import grad_fn_of, is_node, mro

if TYPE_CHECKING:
    import torch


_EVERY_ADDRESS = 2**46
"""A storage of so many bytes is no memory: on the emulated device, one covers all addresses."""


def tensor_rules(blocks: Mapping[int, int] | None = None) -> RulesForType:
    """Return the rules for a search for storages: who has them, and what else is referenced.

    A storage has two keys, because some meters see storages and others the allocator's blocks: its
    own address in C++ and the address of its data. Both are addresses of live blocks of this
    process, so the keys of different storages never collide. A storage that uses parts of `blocks`,
    such as a part of a mapped file, has the addresses of those blocks as well.

    Args:
        blocks: the addresses of blocks of memory, and how many bytes each has.
    """
    import torch

    from pytest_cka_memory.meters.objects import PLAIN_TENSORS, with_subclasses

    keys_of_tensor, keys_of_storage = _key_functions(blocks or {})
    references_of_plain = _plain_references()
    tensor_types = with_subclasses(torch.Tensor)
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    of_cpp = cpp_rules()
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
    import torch

    from pytest_cka_memory.meters.objects import PLAIN_TENSORS, storages_of
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


def dtype_and_shape_of(value: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """Return the dtype, such as ``float32``, and the shape of a tensor; None each if unknown."""
    import torch

    from pytest_cka_memory.meters import torch_private

    if not issubclass(type(value), torch.Tensor) or torch_private.is_tracing():
        return None, None  # while torch.jit traces, sizes are tensors and become part of the trace
    with torch_private.no_subclass_function(), torch_private.no_dispatch():
        dtype = str(_field(value, "dtype")).removeprefix("torch.")
        try:
            shape = tuple(_field(value, "shape"))
        except Exception:  # a strided nested tensor has no shape, a subclass may raise anything
            return dtype, None
    return dtype, shape if all(type(size) is int for size in shape) else None


def _field(tensor: "torch.Tensor", name: str) -> Any:
    """Return an attribute as torch defines it, even if the tensor's class overrides it."""
    import torch

    return getattr(torch.Tensor, name).__get__(tensor)


def is_part_of_its_storage(tensor: "torch.Tensor") -> bool:
    """Whether a tensor is smaller than its storage; False if it has none or several."""
    from pytest_cka_memory.meters import torch_private
    from pytest_cka_memory.meters.objects import storages_of

    with torch_private.no_subclass_function(), torch_private.no_dispatch():
        storages = storages_of(tensor)
        inner = torch_private.unwrapped(tensor)  # has all elements, and not those of one example
        tensor = tensor if inner is None else inner
        try:
            return len(storages) == 1 and _field(tensor, "nbytes") < storages[0].nbytes()
        except Exception:  # as in dtype_and_shape_of
            return False


def is_pinned_tensor(value: Any) -> bool:
    """Whether a value is a tensor or storage in pinned memory of the host, as far as is known."""
    import torch

    from pytest_cka_memory.meters import torch_private
    from pytest_cka_memory.meters.objects import is_pinned

    if torch_private.is_tracing() or not issubclass(
        type(value), (torch.Tensor, torch.UntypedStorage)
    ):
        return False
    with torch_private.no_subclass_function(), torch_private.no_dispatch():
        return is_pinned(value)


def class_name(kind: type) -> str:
    """Return the name of a class, even if its metaclass overrides ``__name__``."""
    found: str = type.__dict__["__name__"].__get__(kind)
    return found


def _plain_references() -> Callable[["torch.Tensor"], Iterable[tuple[str, Any]]]:
    """Return a function that does what :func:`_references_of_tensor` does, in a fifth of the time.

    Only for types of torch that override nothing. A search asks every live tensor, and most are no
    views, were not computed by autograd and have neither gradient nor hooks. Reading that of a
    tensor that is no view runs no operator, so no mode needs to be off.
    """
    from pytest_cka_memory.meters.torch_private import TENSOR_HOOKS, base_of

    hooks, later_hooks = (*TENSOR_HOOKS, "grad", "grad")[:2]  # a version of torch may lack them

    def references(tensor: "torch.Tensor") -> Iterable[tuple[str, Any]]:
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


def _references_of_tensor(tensor: "torch.Tensor") -> Iterator[tuple[str, Any]]:
    from pytest_cka_memory.meters import torch_private
    from pytest_cka_memory.meters.objects import gradient_of

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


def is_gradient(value: Any, tensor: Any) -> bool:
    """Whether `value` is the ``.grad`` of `tensor`, if that is a tensor."""
    import torch

    from pytest_cka_memory.meters import torch_private
    from pytest_cka_memory.meters.objects import gradient_of

    if not issubclass(type(tensor), torch.Tensor):
        return False
    with torch_private.no_subclass_function():
        return gradient_of(tensor) is value


def is_hooks(value: Any, tensor: Any) -> bool:
    """Whether `value`, a dict, has the hooks of `tensor`, if that is a tensor.

    Any dict of a tensor counts in a torch version that does not tell them.
    """
    import torch

    from pytest_cka_memory.meters import torch_private

    if not issubclass(type(tensor), torch.Tensor):
        return False
    if not torch_private.KNOWS_TENSOR_HOOKS:
        return True
    with torch_private.no_subclass_function():
        return any(getattr(tensor, name) is value for name in torch_private.TENSOR_HOOKS)


def _node_rules(kind: type) -> TypeRules:
    """Return the rules for one type of autograd node: its inputs' nodes and saved tensors."""
    from pytest_cka_memory.meters.torch_private import raw_saved

    saved = raw_saved(kind)
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
    from pytest_cka_memory.meters.torch_private import unpacked_name

    plain = unpacked_name(name)
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
        found = getattr(node, name)
        return found if index is None else found[index]
    except Exception:  # a user's hook that raises
        return None


def _references_of_array(array: Any, kind: Any) -> Iterator[tuple[str, Any]]:
    base = kind.base.__get__(array)
    if base is not None:
        yield ".base", base
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
