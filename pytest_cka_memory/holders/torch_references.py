"""References that the garbage collector does not see: of tensors, autograd nodes and NumPy arrays.

Also references that it sees but cannot name, such as those of a ``threading.local``.
"""

import contextvars
import gc
import sys
import threading
import types
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.holders.search import RulesForType, TypeRules

if TYPE_CHECKING:
    import torch


def tensor_rules() -> RulesForType:
    """Return the rules for a search for storages: who has them, and what else is referenced."""
    import torch

    from pytest_cka_memory.meters import torch_private
    from pytest_cka_memory.meters.ledger.live_objects import storages_of, with_subclasses

    tensor_types = with_subclasses(torch.Tensor)
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    plain = {
        torch.UntypedStorage: TypeRules(lambda storage: (torch_private.storage_key(storage),)),
        contextvars.Context: TypeRules(extra_references=_references_of_context),
        memoryview: TypeRules(extra_references=lambda view: [(".obj", view.obj)]),
    }

    def keys(tensor: "torch.Tensor") -> Collection[int]:
        return [torch_private.storage_key(storage) for storage in storages_of(tensor)]

    def rules_for(kind: type) -> TypeRules | None:
        if kind in tensor_types:
            return TypeRules(keys, _references_of_tensor)
        if _is_node(kind):
            return _node_rules(kind)
        if array in mro(kind):
            return TypeRules(extra_references=lambda value: _references_of_array(value, array))
        if threading.local in mro(kind):
            return TypeRules(extra_references=_references_of_thread_local)
        return plain.get(kind)

    return rules_for


def mro(kind: type) -> tuple[type, ...]:
    """Return a class and its bases, even if its metaclass overrides ``__mro__``."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(kind)
    return found


def _references_of_tensor(tensor: "torch.Tensor") -> Iterator[tuple[str, Any]]:
    from pytest_cka_memory.meters import torch_private
    from pytest_cka_memory.meters.ledger.live_objects import gradient_of

    with torch_private.no_subclass_function():
        if (node := grad_fn_of(tensor)) is not None:
            yield ".grad_fn", node
        if (gradient := gradient_of(tensor)) is not None:
            yield ".grad", gradient
        for name in torch_private.TENSOR_HOOKS:
            if (hooks := getattr(tensor, name)) is not None:
                yield f".{name}", hooks


def grad_fn_of(tensor: "torch.Tensor") -> Any:
    """Return the autograd node that computed a tensor; None if it has none or cannot be asked."""
    from pytest_cka_memory.meters import torch_private

    with torch_private.no_subclass_function(), torch_private.no_dispatch():  # as in gradient_of
        try:
            return tensor.grad_fn
        except RuntimeError:  # a view whose base was modified in a way that autograd rejects
            return None


def _is_node(kind: type) -> bool:
    found = (type.__dict__["__dict__"].__get__(cls).get("next_functions") for cls in mro(kind))
    return any(type(item) is types.GetSetDescriptorType for item in found)


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
