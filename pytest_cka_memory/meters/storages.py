"""Find the tensor storages alive in this process."""

import gc
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# A tensor without one plain storage (opaque, batched by functorch, not yet materialised) answers
# with one of these; it is not ours to count. A subclass may answer with anything.
_NO_STORAGE = (NotImplementedError, RuntimeError, ValueError, AttributeError)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages_of(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, ...]:
    """Every storage behind `tensor`: one, or those of a sparse tensor's or a wrapper's parts."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        try:
            return (tensor.untyped_storage(),)
        except _NO_STORAGE:
            return ()
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return _storages_of_parts(tensor)
        except Exception:
            return ()


def _storages_of_parts(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, ...]:
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout in _SPARSE_PARTS:
        parts = [getattr(tensor, name)() for name in _SPARSE_PARTS[tensor.layout]]
    else:
        return (tensor.untyped_storage(),)
    return tuple(s for part in parts if isinstance(part, torch.Tensor) for s in storages_of(part))


def live_storages(device: torch.device, *, young: bool = False) -> Iterator[torch.UntypedStorage]:
    """Each storage on `device` that a Python object, a ``.grad`` or a script module holds.

    Walks the garbage collector's objects (about 20 ms for 300,000), or with `young` only those
    that no full collection has met yet (below 1 ms). Tensors that only C++ holds are invisible
    here.
    """
    # One at a time and no list of our own, which would be an object too, and so hold itself.
    generations = (0, 1) if young else (None,)
    objects = (gc.get_objects(generation=number) for number in generations)
    seen: set[int] = set()
    for storage in _storages_among(chain.from_iterable(objects)):
        if storage.device == device and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _storages_among(objects: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    tensor_types = with_subclasses(torch.Tensor)
    script_types = with_subclasses(torch.jit.ScriptModule)
    # By type, never isinstance: that asks __class__, and a dead weak proxy raises.
    for item in objects:
        kind = type(item)
        if kind in tensor_types:
            yield from storages_of(item)
            gradient = _gradient_of(item)
            if gradient is not None:
                yield from storages_of(gradient)
        elif kind is torch.UntypedStorage:
            # Before torch 2.15 it may outlive its storage, if that was shared between processes.
            if not StorageWeakRef(item).expired():
                yield item
        elif kind in script_types:  # its tensors live in C++ until asked for
            for tensor in _script_tensors(item):
                yield from storages_of(tensor)


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        # Asking any other tensor for its gradient prints a warning.
        return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _script_tensors(module: torch.jit.ScriptModule) -> list[torch.Tensor]:
    try:
        return [*module.parameters(), *module.buffers()]
    except (RuntimeError, AttributeError):  # still under construction
        return []


def with_subclasses(base: type) -> set[type]:
    """`base` and every class derived from it so far."""
    found = {base}
    todo = [base]
    while todo:
        # type.__subclasses__ and not cls.__subclasses__: a metaclass may override it.
        subclasses: list[type] = type.__subclasses__(todo.pop())
        todo.extend(kind for kind in subclasses if kind not in found)
        found.update(subclasses)
    return found
