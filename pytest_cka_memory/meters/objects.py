"""What live Python objects are for a meter: tensor storages and autograd nodes."""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.collector import Generations

if TYPE_CHECKING:
    import torch


def mro(kind: type) -> tuple[type, ...]:
    """Return a class and its bases, even if its metaclass overrides ``__mro__``."""
    classes: tuple[type, ...] = type.__dict__["__mro__"].__get__(kind)
    return classes


def is_node(kind: type) -> bool:
    """Whether a type is that of an autograd node."""
    descriptors = (
        type.__dict__["__dict__"].__get__(cls).get("next_functions") for cls in mro(kind)
    )
    return any(type(item) is types.GetSetDescriptorType for item in descriptors)


def grad_fn_of(tensor: "torch.Tensor") -> Any:
    """Return the autograd node that computed a tensor; None if it has none or cannot be asked."""
    from pytest_cka_memory.meters import torch_private

    with torch_private.no_subclass_function(), torch_private.no_dispatch():  # as in gradient_of
        try:
            return tensor.grad_fn
        except RuntimeError:  # a view whose base was modified in a way that autograd rejects
            return None


# A tensor without a plain storage (opaque, batched by functorch, not yet materialised) raises one
# of these and is not counted. A subclass may raise anything.
NO_STORAGE = (NotImplementedError, RuntimeError, ValueError, AttributeError)
plain_storage_of = torch.Tensor.untyped_storage  # read at import, because a test may patch it
PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_SPARSE_PARTS = {
    torch.sparse_coo: torch_private.SPARSE_PARTS,
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_COUNTED_LAYOUTS = frozenset((torch.strided, torch.jagged, *_SPARSE_PARTS))


_incomplete: dict[str, None] = {}
"""Notes about tensors whose memory is not counted, or not completely, each once and in order."""


def notes() -> tuple[str, ...]:
    """Return a line for each kind of tensor whose memory could not be counted completely."""
    return tuple(_incomplete)


def storages_of(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, ...]:
    """Return the storages of `tensor`: one, or those of the parts of a sparse or wrapper tensor."""
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
        try:
            return (plain_storage_of(tensor),)
        except NO_STORAGE:
            inner = torch_private.unwrapped(tensor)
            return () if inner is None else storages_of(inner)
    with torch_private.no_subclass_function():
        try:
            return _storages_of_parts(tensor)
        except Exception:
            layout = tensor.layout if type(tensor) in PLAIN_TENSORS else torch.strided
            if layout not in _COUNTED_LAYOUTS:
                _incomplete[f"not counted: tensors with layout {layout}"] = None
            return ()


_USES_OF_TENSOR_AND_OBJECT = 2
"""Uses of a storage that has one tensor: by the tensor, and by its object in Python."""


def is_only_tensor(value: Any) -> bool:
    """Whether a value is a tensor whose storage no other tensor, node or object of C++ uses."""
    if not issubclass(type(value), torch.Tensor) or torch_private.use_count(value) != 1:
        return False
    for storage in storages_of(value):
        key = torch_private.storage_key(storage)
        if torch_private.storage_use_count(key) != _USES_OF_TENSOR_AND_OBJECT:
            return False
    return True


def storages_in(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the tensors in `value`, including nested lists, tuples and dicts."""
    if isinstance(value, torch.UntypedStorage):
        yield value
    elif isinstance(value, torch.Tensor):
        yield from storages_of(value)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from storages_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from storages_in(part)


def _storages_of_parts(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, ...]:
    if hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "__tensor_unflatten__"):
        parts = _inner_tensors(tensor)
    elif tensor.layout in _SPARSE_PARTS:
        # The user's modes must not see these calls.
        with torch_private.no_dispatch() if type(tensor) in PLAIN_TENSORS else nullcontext():
            parts = [getattr(tensor, name)() for name in _SPARSE_PARTS[tensor.layout]]
    else:
        return (tensor.untyped_storage(),)
    return tuple(s for part in parts if isinstance(part, torch.Tensor) for s in storages_of(part))


def _inner_tensors(tensor: Any) -> list[Any]:
    """Return the tensors in which a wrapper subclass keeps its values."""
    try:
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    except Exception as error:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        problem = f"its __tensor_flatten__ raised {type(error).__name__}"
        _incomplete[f"{kind}: only tensors in its attributes are counted, because {problem}"] = None
        # Only plain ones: others may have this tensor among their own attributes.
        return [value for value in vars(tensor).values() if type(value) in PLAIN_TENSORS]


def _kinds() -> set[type]:
    script_types = with_subclasses(torch.jit.ScriptModule)
    return {torch.UntypedStorage} | script_types | with_subclasses(torch.Tensor)


_HOLDING = Generations(_kinds)
"""The Python objects that may hold storages."""


def none_after_collecting() -> bool:
    """Collect young garbage only, and return whether that proves that no tensor is left."""
    return _HOLDING.none_after_collecting()


def live_storages(
    device: torch.device,
    *,
    young: bool = False,
    objects_of: Callable[[set[type]], Iterable[Any]] | None = None,
    shared: bool = True,
) -> Iterator[torch.UntypedStorage]:
    """Yield each storage on `device` that a Python object, a ``.grad`` or a script module holds.

    Searches all objects of the garbage collector, or with `young` only its young generations, which
    takes less than 1 ms. Tensors that only C++ holds are not found. `objects_of` is a faster way to
    find all objects of some types. Without `shared`, only storages that one plain tensor uses, and
    nothing else.
    """
    seen: set[int] = set()
    if objects_of is not None:
        objects = objects_of(_kinds())
    else:
        objects = _HOLDING.young() if young else _HOLDING.all()
    for storage in _storages_among(objects) if shared else _unshared_among(objects):
        if storage.device == device and (key := torch_private.storage_key(storage)) not in seen:
            seen.add(key)
            yield storage


def _storages_among(objects: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    script_types = with_subclasses(torch.jit.ScriptModule)
    for item in objects:
        kind = type(item)
        if kind is torch.UntypedStorage:
            if not was_freed(item):
                yield item
        elif kind in script_types:  # its tensors are in C++ until they are read
            for tensor in _script_tensors(item):
                yield from storages_of(tensor)
        else:
            yield from storages_of(item)
            gradient = gradient_of(item)
            if gradient is not None:
                yield from storages_of(gradient)


def _unshared_among(objects: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for item in objects:
        is_plain = type(item) in PLAIN_TENSORS and item.layout is torch.strided
        # Others consist of tensors that other objects may use.
        if is_plain and torch_private.unwrapped(item) is None and is_only_tensor(item):
            yield from storages_of(item)


def was_freed(storage: torch.UntypedStorage) -> bool:
    """Whether only the Python object of `storage` is left.

    In torch 2.9 it lives as long as a StorageWeakRef, which torch has for each storage that is
    shared between processes. Such an object still has its size, but is no longer shared.
    """
    expired: bool = StorageWeakRef(storage).expired()
    return expired


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's ``.grad``; None if it has none or cannot be asked."""
    # Reading is_leaf of a view may run its operators again; modes must not see them.
    with torch_private.no_subclass_function(), torch_private.no_dispatch():
        try:
            # Reading .grad of any other tensor prints a warning.
            return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        # A view whose base was modified in a way that autograd rejects raises, and so does one that
        # is being compiled, because it cannot run its operators without its mode.
        except NO_STORAGE:
            return None


def _script_tensors(module: torch.jit.ScriptModule) -> list[torch.Tensor]:
    try:
        return [*module.parameters(), *module.buffers()]
    except (RuntimeError, AttributeError):  # still under construction
        return []


def with_subclasses(base: type) -> set[type]:
    """Return `base` and every class derived from it so far."""
    kinds = {base}
    todo = [base]
    while todo:
        # type.__subclasses__ and not cls.__subclasses__: a metaclass may override it.
        subclasses: list[type] = type.__subclasses__(todo.pop())
        todo.extend(kind for kind in subclasses if kind not in kinds)
        kinds.update(subclasses)
    return kinds


def may_be_pinned() -> bool:
    """Whether there may be pinned memory: not as long as no accelerator is initialized."""
    modules = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return any(module is not None and module.is_initialized() for module in modules)


def is_pinned(value: Any) -> bool:
    """Whether the memory of a tensor or storage is pinned; False if that is not known.

    No accelerator is initialized for this.
    """
    if not may_be_pinned():
        return False
    try:
        return value.device.type == "cpu" and bool(value.is_pinned())
    except (RuntimeError, TypeError):  # it has no memory of its own
        return False
