"""References that the garbage collector does not see: of tensors, autograd nodes, foreign arrays.

Also those it sees but cannot name, such as what a ``threading.local`` holds for each thread.
"""

import contextvars
import gc
import sys
import threading
import types
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.holders.search import Look, LookAt

if TYPE_CHECKING:
    import torch


def look_for_tensors() -> LookAt:
    """Tell of each type which storages its objects hold, and what else they refer to."""
    import torch

    from pytest_cka_memory.meters import torch_private
    from pytest_cka_memory.meters.ledger.live_objects import storages_of, with_subclasses

    tensor_types = with_subclasses(torch.Tensor)
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    plain = {
        torch.UntypedStorage: Look(lambda storage: (torch_private.storage_key(storage),)),
        contextvars.Context: Look(beyond=_beyond_context),
        memoryview: Look(beyond=lambda view: [(".obj", view.obj)]),
    }

    def keys(tensor: "torch.Tensor") -> Collection[int]:
        return [torch_private.storage_key(storage) for storage in storages_of(tensor)]

    def look_at(kind: type) -> Look | None:
        if kind in tensor_types:
            return Look(keys, _beyond_tensor)
        if _is_node(kind):
            return _look_at_node(kind)
        if array in mro(kind):
            return Look(beyond=lambda value: _beyond_array(value, array))
        if threading.local in mro(kind):
            return Look(beyond=_beyond_thread_local)
        return plain.get(kind)

    return look_at


def mro(kind: type) -> tuple[type, ...]:
    """A class and its bases, whatever its metaclass says."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(kind)
    return found


def _beyond_tensor(tensor: "torch.Tensor") -> Iterator[tuple[str, Any]]:
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
    """What computed it, where that was differentiable and can be asked."""
    from pytest_cka_memory.meters import torch_private

    with torch_private.no_subclass_function(), torch_private.no_dispatch():  # as in gradient_of
        try:
            return tensor.grad_fn
        except RuntimeError:  # a view whose base was changed behind autograd's back
            return None


def _is_node(kind: type) -> bool:
    found = (type.__dict__["__dict__"].__get__(cls).get("next_functions") for cls in mro(kind))
    return any(type(item) is types.GetSetDescriptorType for item in found)


def _look_at_node(kind: type) -> Look:
    """What autograd nodes of one kind lead to: their inputs' nodes, and the tensors they saved."""
    from pytest_cka_memory.meters.torch_private import raw_saved

    saved = raw_saved(kind)
    is_leaf = "variable" in dir(kind)

    def beyond(node: Any) -> Iterator[tuple[str, Any]]:
        for index, (following, _) in enumerate(node.next_functions):
            if following is not None:
                yield f".next_functions[{index}][0]", following
        if is_leaf:
            yield ".variable", node.variable
        for name in saved:
            yield from _saved(node, name)

    return Look(beyond=beyond)


def _saved(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What is saved under `name`, as it is: to unpack it would run the user's hooks."""
    from pytest_cka_memory.meters.torch_private import opened

    plain = opened(name)
    try:
        raw = getattr(node, name)
        several = isinstance(raw, tuple)
        for index, saved in enumerate(raw if several else (raw,)):
            place = f"[{index}]" if several else ""
            if not hasattr(saved, "data"):  # torch 2.9; delete with it
                yield f".{plain}{place}", _unpacked(node, plain, index if several else None)
            elif saved.unpack_hook is not None:
                yield f".{name}{place}.data", saved.data
            else:
                yield f".{plain}{place}", saved.data
    except RuntimeError:  # freed by its backward pass
        return


def _unpacked(node: Any, name: str, index: int | None) -> Any:
    """What is saved under `name`; torch 2.9 tells it only unpacked, by the user's hook if any."""
    try:
        found = getattr(node, name)
        return found if index is None else found[index]
    except Exception:  # a user's hook that raises
        return None


def _beyond_array(array: Any, kind: Any) -> Iterator[tuple[str, Any]]:
    base = kind.base.__get__(array)
    if base is not None:
        yield ".base", base
    if kind.dtype.__get__(array).hasobject and not kind.dtype.__get__(array).names:
        for index, value in enumerate(kind.flat.__get__(array)):
            yield f".flat[{index}]", value


def _beyond_context(context: contextvars.Context) -> Iterator[tuple[str, Any]]:
    for variable, value in context.items():
        yield f"[<ContextVar {variable.name!r}>]", value


def _beyond_thread_local(local: threading.local) -> Iterator[tuple[str, Any]]:
    """Each thread's attributes: a dict of dicts, which has no name in Python."""
    for threads in gc.get_referents(local):
        if type(threads) is dict:
            yield from ((".__dict__", names) for names in threads.values() if type(names) is dict)
