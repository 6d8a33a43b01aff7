"""The live tensor storages of this process, found among Python's objects.

To search only the young generations of the garbage collector is often proved to be enough, which
saves most of a region's cost: see :class:`Generations`.

A list of all objects that outlives one call in C breaks other threads: ``tuple(generator)`` raises
a SystemError if something else references the tuple that it is building. Every search in
:class:`Generations` is therefore one call, in which the list is created, read to its end and freed.
"""

import gc
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain, compress, repeat
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.garbage import PROMOTED_TOGETHER, without_collections

# A tensor without a plain storage (opaque, batched by functorch, not yet materialised) raises one
# of these and is not counted. A subclass may raise anything.
_NO_STORAGE = (NotImplementedError, RuntimeError, ValueError, AttributeError)
_untyped_storage = torch.Tensor.untyped_storage  # read at import, because a test may patch it
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
            return (_untyped_storage(tensor),)
        except _NO_STORAGE:
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


class Generations:
    """The objects of the types that `kinds` returns; it may return more types later.

    If the oldest generation was seen without an object of these types, and a list created then is
    still young, no object has been promoted since (in the versions of CPython that promote both
    young generations together). So all objects of these types are young.
    """

    def __init__(self, kinds: Callable[[], set[type]]) -> None:
        self._kinds = kinds
        self._witness: list[Any] | None = None
        """Created when the oldest generation was seen to contain no such object."""

    def young(self) -> Iterator[Any]:
        """Yield those in the young generations."""
        kinds = self._kinds()
        return chain.from_iterable(_of(kinds, number) for number in (0, 1))

    def all(self) -> Iterator[Any]:
        """Yield all of them."""
        if self._all_are_young():
            yield from self.young()
            if self._all_are_young():  # none was promoted during the search
                return
        witness: list[Any] = []  # before the search: later objects are younger
        none = True
        kinds = self._kinds()
        for item in chain.from_iterable(_of(kinds, number) for number in (0, 1, 2)):
            none = False
            yield item
        self._witness = witness if none else None

    def none_after_collecting(self) -> bool:
        """Collect young garbage only, and return whether that proves that no such object is left.

        False proves nothing. Old garbage is not collected: it contains no such object, but its
        finalizers, which might create one, do not run.
        """
        return without_collections(self._is_none_left)  # one would invalidate the proof

    def _is_none_left(self) -> bool:
        if not self._all_are_young() or _any(self.young()):
            return False
        gc.collect(1)
        if len(sys._current_frames()) == 1:  # another thread's objects may have been promoted
            self._witness = []  # objects created by finalizers are young
        return not _any(self.all())

    def _all_are_young(self) -> bool:
        if self._witness is None or not PROMOTED_TOGETHER:
            return False
        is_witness = partial(operator.is_, self._witness)
        return any(sum(map(is_witness, _objects(number))) for number in (1, 0))


def _objects(generation: int) -> Iterator[Any]:
    """Return an iterator that lists the objects of a generation when it is first asked."""
    return chain.from_iterable(map(gc.get_objects, (generation,)))


def _of(kinds: set[type], generation: int) -> list[Any]:
    """Return the objects of some types in a generation."""
    # By type and not isinstance, which reads __class__: a dead weak proxy raises. By the type's
    # number, because a type's metaclass may compare and hash it in Python.
    numbers = frozenset(map(id, kinds))

    def search() -> list[Any]:
        chosen = map(numbers.__contains__, map(id, map(type, _objects(generation))))
        # The second list of the youngest generation has the first one too, at its end.
        return list(compress(chain(_objects(generation), repeat(None)), chosen))

    return without_collections(search)  # both lists must have the same objects in the same order


def _any(objects: Iterator[Any]) -> bool:
    return next((True for _ in objects), False)


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
) -> Iterator[torch.UntypedStorage]:
    """Yield each storage on `device` that a Python object, a ``.grad`` or a script module holds.

    Searches all objects of the garbage collector, or with `young` only its young generations, which
    takes less than 1 ms. Tensors that only C++ holds are not found. `objects_of` is a faster way to
    find all objects of some types.
    """
    seen: set[int] = set()
    if objects_of is not None:
        objects = objects_of(_kinds())
    else:
        objects = _HOLDING.young() if young else _HOLDING.all()
    for storage in _storages_among(objects):
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
        except _NO_STORAGE:
            return None


def _script_tensors(module: torch.jit.ScriptModule) -> list[torch.Tensor]:
    try:
        return [*module.parameters(), *module.buffers()]
    except (RuntimeError, AttributeError):  # still under construction
        return []


def with_subclasses(base: type) -> set[type]:
    """Return `base` and every class derived from it so far."""
    found = {base}
    todo = [base]
    while todo:
        # type.__subclasses__ and not cls.__subclasses__: a metaclass may override it.
        subclasses: list[type] = type.__subclasses__(todo.pop())
        todo.extend(kind for kind in subclasses if kind not in found)
        found.update(subclasses)
    return found


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
