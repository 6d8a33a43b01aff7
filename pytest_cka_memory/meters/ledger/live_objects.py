"""Find the tensor storages alive in this process."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.ledger.generations import Generations

# A tensor without one plain storage (opaque, batched by functorch, not yet materialised) answers
# with one of these; it is not ours to count. A subclass may answer with anything.
_NO_STORAGE = (NotImplementedError, RuntimeError, ValueError, AttributeError)
_untyped_storage = torch.Tensor.untyped_storage  # now: a test may patch it, and would blind us
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_SPARSE_PARTS = {
    torch.sparse_coo: torch_private.SPARSE_PARTS,
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages_of(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, ...]:
    """Every storage behind `tensor`: one, or those of a sparse tensor's or a wrapper's parts."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        try:
            return (_untyped_storage(tensor),)
        except _NO_STORAGE:
            return ()
    with torch_private.no_subclass_function():
        try:
            return _storages_of_parts(tensor)
        except Exception:
            return ()


def _storages_of_parts(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, ...]:
    if hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "__tensor_unflatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout in _SPARSE_PARTS:
        parts = [getattr(tensor, name)() for name in _SPARSE_PARTS[tensor.layout]]
    else:
        return (tensor.untyped_storage(),)
    return tuple(s for part in parts if isinstance(part, torch.Tensor) for s in storages_of(part))


def _kinds() -> set[type]:
    script_types = with_subclasses(torch.jit.ScriptModule)
    return {torch.UntypedStorage} | script_types | with_subclasses(torch.Tensor)


_HOLDING = Generations(_kinds)
"""Python objects that hold storages."""


def none_after_collecting() -> bool:
    """Collect young garbage only, and return whether it is proved that no tensor is left."""
    return _HOLDING.none_after_collecting()


def live_storages(device: torch.device, *, young: bool = False) -> Iterator[torch.UntypedStorage]:
    """Each storage on `device` that a Python object, a ``.grad`` or a script module holds.

    Walks the garbage collector's objects, or with `young` only those that few collections have
    met yet (below 1 ms). Tensors that only C++ holds are invisible here.
    """
    seen: set[int] = set()
    for storage in _storages_among(_HOLDING.young() if young else _HOLDING.all()):
        if storage.device == device and (key := torch_private.storage_key(storage)) not in seen:
            seen.add(key)
            yield storage


def _storages_among(objects: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    script_types = with_subclasses(torch.jit.ScriptModule)
    for item in objects:
        kind = type(item)
        if kind is torch.UntypedStorage:
            # Before torch 2.15 it may outlive its storage, if that was shared between processes.
            if not StorageWeakRef(item).expired():
                yield item
        elif kind in script_types:  # its tensors live in C++ until asked for
            for tensor in _script_tensors(item):
                yield from storages_of(tensor)
        else:
            yield from storages_of(item)
            gradient = gradient_of(item)
            if gradient is not None:
                yield from storages_of(gradient)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its ``.grad``, where it may have one and can be asked."""
    # To ask a view whether it is a leaf may run its operators anew, which no mode is to see.
    with torch_private.no_subclass_function(), torch_private.no_dispatch():
        try:
            # Asking any other tensor for its gradient prints a warning.
            return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        # A view whose base was changed behind autograd's back refuses, and one in the midst of
        # being compiled cannot run them without its mode.
        except _NO_STORAGE:
            return None


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
