"""Which storages would be freed if garbage was: those that only garbage keeps alive.

The collector sees what Python objects reference. Tensors, storages and autograd nodes reference
each other in C++, too: each of them is freed with the last of its references in both languages. So
all references are counted that end with the garbage, and compared with those that there are.
Nothing is freed for it.
"""

import datetime
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from itertools import takewhile
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.meters import torch_keepers, torch_private
from pytest_cka_memory.meters.blocks.python_objects import (
    Asked,
    CompiledRelease,
    HowToFollow,
    learn,
    learn_saved,
)
from pytest_cka_memory.meters.objects import (
    PLAIN_TENSORS,
    grad_fn_of,
    gradient_of,
    is_node,
    plain_storage_of,
    storages_of,
)


class Freed(NamedTuple):
    """What is freed with garbage."""

    storages: list[torch.UntypedStorage]
    is_complete: bool
    """False if there may be more, because torch does not show all that the garbage references."""
    followed: int
    """How many objects with references in C++ were followed,"""
    asked: int
    """and how many of them not by the library, which takes several times as long."""
    waiting: frozenset[int]
    """Identities of objects that have lost all references of Python, but not those of C++; of nodes
    their addresses in C++, because some versions of torch make their Python objects anew."""
    nodes: frozenset[int] = frozenset()
    """Addresses of the autograd nodes that are freed."""


def freed_with(garbage: Sequence[Any], followed: Collection[int] = ()) -> Freed:
    """Return what is freed with `garbage`, the objects of a census.

    Args:
        garbage: the objects.
        followed: addresses of nodes that are left out. To follow a node makes a Python object of
            it, which some versions of torch keep, and which is garbage then.
    """
    if followed:
        garbage = [value for value in garbage if _address_of(value) not in followed]
    if not garbage:
        return Freed([], is_complete=True, followed=0, asked=0, waiting=frozenset())
    with torch_private.no_torch_function():  # the user's modes must not see these calls
        _learn_types()
        return _Release(garbage).freed()


def _address_of(value: Any) -> int:
    """Return the address of an autograd node in C++; 0 for any other object."""
    if _node_kind(type(value)) is None:
        return 0
    return torch_keepers.address_of_node(value) or 0


class _Reference(NamedTuple):
    """A reference to an object, which counts in Python or in C++."""

    value: Any
    in_python: bool = False


_UNKNOWN = torch_keepers.Uses(cpp=2**31, python=0)
"""For an object whose references cannot be counted: so many that it always counts as in use."""
_ONLY_PYTHON = torch_keepers.Uses(cpp=0, python=0)


class _NoType:
    """Instead of NumPy's array, while nothing has imported NumPy."""


_OTHERS = (torch.UntypedStorage, *torch_private.SAVED_TENSORS)
_OPAQUE = (
    *torch_private.SCRIPT_TYPES,
    *(torch.jit.ScriptModule, torch.futures.Future, type(datetime.datetime_CAPI)),
)
"""Types that hold tensors in C++ where they cannot be seen; the last is that of capsules."""
_OPAQUE_NODES = ("CopySlices", "CppFunction")
"""Names of types of nodes that do not show what they keep: the first has a node inside, the second
is that of nodes which torch has no type for, such as those of ``torch._foreach_mul``."""
_ON_HEAP = 1 << 9
"""The flag of types that are not static in C++: ``Py_TPFLAGS_HEAPTYPE``."""
_flags_of: Callable[[type], int] = type.__dict__["__flags__"].__get__
"""Not the attribute, which the metaclass of a user may compute."""
_TYPES_OF_TORCH = frozenset(map(id, (*PLAIN_TENSORS, torch.UntypedStorage)))
_DEEPEST = 2_000
"""No graph is followed deeper. torch makes a Python object for each node that is looked at, and
keeps it in some versions: a chain of 50,000 of them overflows the stack when it is freed."""


class _NodeKind(NamedTuple):
    """What all autograd nodes of one type have in common."""

    saved: tuple[str, ...]
    """The attributes that hold saved tensors."""
    has_leaf: bool
    """Whether it adds up the gradient of a leaf, which it references."""
    is_opaque: bool


_of_lasting_types: dict[int, _NodeKind | None] = {}
"""What is known of types that exist as long as the process, by their identities; None for one that
is not that of a node. A loop frees the same types of objects in each batch, and to ask for this
takes longer than to follow one of them."""
_of_other_types: weakref.WeakKeyDictionary[type, _NodeKind | None] = weakref.WeakKeyDictionary()


def _node_kind(kind: type) -> _NodeKind | None:
    """Return what nodes of a type have in common; None if it is not a type of nodes."""
    ident = id(kind)
    if ident in _of_lasting_types:
        return _of_lasting_types[ident]
    may_be_key = type(kind) is type  # the metaclass of a user may compare and hash in Python
    if may_be_key and kind in _of_other_types:
        return _of_other_types[kind]
    node_kind = None
    if is_node(kind):
        # Not an attribute of that name which a user's own function sets.
        has_leaf = type(getattr(kind, "variable", None)) is types.GetSetDescriptorType
        node_kind = _NodeKind(
            torch_keepers.raw_saved(kind), has_leaf, kind.__name__ in _OPAQUE_NODES
        )
    if not _flags_of(kind) & _ON_HEAP or ident in _TYPES_OF_TORCH:
        _of_lasting_types[ident] = node_kind
    elif may_be_key:
        _of_other_types[kind] = node_kind
    return node_kind


@cache
def _learn_types() -> None:
    """Let the library follow tensors and storages of torch's own types, and what nodes save."""
    learn_saved(torch_keepers.place_of_hooks())
    of_cpp = int(torch_keepers.keeps_objects())
    steps = (
        (Asked.MUST_BE, attrgetter("layout"), torch.strided),
        (Asked.MUST_BE, _is_special_view, False),
        (Asked.MUST_BE, attrgetter("is_quantized"), False),
        (Asked.MUST_BE, attrgetter("is_nested"), False),
        (Asked.MUST_BE, torch_private.is_lazy_clone, False),
        (Asked.REFERENCE, plain_storage_of, None),
        (Asked.REFERENCE, attrgetter("grad_fn"), None),
        (Asked.REFERENCE, _gradient_of_plain, None),
        (Asked.REFERENCE, torch_private.base_of, None),
    )
    for kind in PLAIN_TENSORS:
        learn(kind, HowToFollow(steps, 1, of_cpp, torch_private.use_count))
    memory = ((Asked.HAS_MEMORY, None, None),)
    counter = torch_keepers.storage_use_count
    learn(torch.UntypedStorage, HowToFollow(memory, 1, of_cpp, counter))


def _learn(kind: type) -> None:
    """Let the library follow the nodes of a type, if it is one of C++ that shows all."""
    if _flags_of(kind) & _ON_HEAP:  # defined in Python, perhaps by a user
        return
    node_kind, way = _node_kind(kind), torch_keepers.way_of_nodes()
    if node_kind is None or node_kind.is_opaque or way is None:
        return
    if node_kind.saved and not torch_private.SHOWS_SAVED:
        return
    steps = [(Asked.NODES, attrgetter("next_functions"), None)]
    if node_kind.has_leaf:
        steps.append((Asked.REFERENCE, attrgetter("variable"), None))
    steps += ((Asked.SAVED, attrgetter(name), None) for name in node_kind.saved)
    how = HowToFollow(
        *(tuple(steps), way.of_object, way.of_cpp),
        place_of_counts=way.place_of_counts,
        # What adds up a leaf's gradient is used by the graphs of all steps, and has no memory.
        may_wait=not node_kind.has_leaf,
    )
    learn(kind, how)


@cache
def _special_types(array: type) -> tuple[type, ...]:
    return torch.Tensor, torch_private.FUNCTION_BASE, array, *_OTHERS, *_OPAQUE


def _is_special_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view that takes more to follow than its storage and its base.

    The node of a view may be made anew when it is read. See also :func:`_has_hidden_parts`.
    """
    base = torch_private.base_of(tensor)
    return base is not None and (
        tensor.requires_grad
        or base.requires_grad
        or base.dtype != tensor.dtype
        or tensor.is_conj()
        or tensor.is_neg()
    )


def _gradient_of_plain(tensor: torch.Tensor) -> torch.Tensor | None:
    # Reading .grad of any other tensor prints a warning.
    return tensor.grad if tensor.grad_fn is None or tensor.retains_grad else None


class _Release:
    """What loses references because garbage is freed. Lives only for one search.

    The library follows what it knows: this follows the other objects.
    """

    def __init__(self, garbage: Sequence[Any]) -> None:
        numpy = sys.modules.get("numpy")
        self._array: type = _NoType if numpy is None else numpy.ndarray
        bases = _special_types(self._array)
        self._python = CompiledRelease(garbage, bases, torch_keepers.type_of_nodes(), _DEEPEST)
        with_references = filter(weakref.getweakrefcount, garbage)
        self._is_complete = not any(map(_calls_back, with_references))

    def freed(self) -> Freed:
        """Follow all references and return what has lost all of its own."""
        python, asked = self._python, 0
        while left_over := python.follow():
            asked += len(left_over)
            for value in left_over:
                _learn(type(value))
                if not python.is_freed(id(value)) and self._is_unused(value):
                    self._free(value)
        waiting, left_over = python.waiting()
        waiting += filter(self._is_waiting, left_over)
        idents = frozenset(_address_of(value) or id(value) for value in waiting)
        nodes = (it for it in python.met if _node_kind(type(it)) is not None)
        freed = frozenset(_address_of(it) for it in nodes if python.is_freed(id(it))) - {0}
        return Freed(python.storages, self._is_complete, len(python.met), asked, idents, freed)

    def _is_waiting(self, value: Any) -> bool:
        node_kind = _node_kind(type(value))
        is_leaf = node_kind is not None and node_kind.has_leaf
        return not is_leaf and self._python.left(id(value)) <= self._uses(value).python

    def _is_unused(self, value: Any) -> bool:
        uses = self._uses(value)
        return self._python.is_unused(id(value), uses.cpp, uses.python)

    def _uses(self, value: Any) -> torch_keepers.Uses:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            return torch_keepers.tensor_uses(value)
        if kind is torch.UntypedStorage:
            return torch_keepers.storage_uses(value)
        if _node_kind(kind) is not None:
            return torch_keepers.node_uses(value) or _UNKNOWN
        return _ONLY_PYTHON

    def _free(self, value: Any) -> None:
        """Let all that an object references lose a reference, as the collector sees it or not."""
        python = self._python
        if type(value) is torch.UntypedStorage:
            python.storages.append(value)
        python.free(id(value))
        values, in_python = self._references_of(value)
        python.note(values)
        for place in in_python:
            python.lose(id(values[place]))
        in_cpp = [it for place, it in enumerate(values) if place not in in_python]
        nodes = list(takewhile(lambda it: _node_kind(type(it)) is not None, in_cpp))
        python.lose_in_cpp(in_cpp, len(nodes), python.depth(id(value)) + 1)

    def _references_of(self, value: Any) -> tuple[list[Any], Collection[int]]:
        """Return what an object references, and at which places those that count in Python are.

        When this has returned, nothing else of this search references a new one of them.
        """
        kind = type(value)
        if kind is torch.UntypedStorage:
            return [], ()
        if issubclass(kind, torch.Tensor):
            references = self._of_tensor(value)
        elif issubclass(kind, self._array):
            references = _of_array(value)
            # An array of records has fields, which may hold objects.
            self._is_complete &= sys.modules["numpy"].ndarray.dtype.__get__(value).fields is None
        elif kind in torch_private.SAVED_TENSORS:  # one that belongs to no node
            references = self._of_saved(value, [])
        elif issubclass(kind, _OPAQUE):
            references = iter(())
            self._is_complete = False
        else:
            return self._of_node(value)
        known = [reference for reference in references if reference.value is not None]
        in_python = {place for place, reference in enumerate(known) if reference.in_python}
        return [reference.value for reference in known], in_python

    def _of_tensor(self, tensor: torch.Tensor) -> Iterator[_Reference]:
        # To read the address of a lazy clone's data would copy the data. Other layouts have parts.
        if _is_lazy_clone(tensor) or _has_hidden_parts(tensor):
            self._is_complete = False
        else:
            yield from map(_Reference, storages_of(tensor))
        with torch_private.no_subclass_function():
            yield _Reference(grad_fn_of(tensor))
            yield _Reference(gradient_of(tensor))
            yield _Reference(torch_private.base_of(tensor))

    def _of_node(self, node: Any) -> tuple[list[Any], Collection[int]]:
        """Return what :meth:`_references_of` does, of an autograd node."""
        kind = _node_kind(type(node))
        if kind is None or kind.is_opaque or self._python.depth(id(node)) >= _DEEPEST:
            self._is_complete = False
            return [], ()
        values = [after for after, _ in node.next_functions if after is not None]
        following, in_python = len(values), set()
        if kind.has_leaf and (leaf := node.variable) is not None:
            values.append(leaf)
        for name in kind.saved:
            try:
                raw = getattr(node, name)
            except RuntimeError:  # the backward pass has freed it
                continue
            several = isinstance(raw, tuple)
            for index, saved in enumerate(raw if several else (raw,)):
                is_packed = torch_keepers.is_packed(saved)
                if torch_private.SHOWS_SAVED and not is_packed:
                    if (data := saved.data) is not None:
                        values.append(data)
                elif torch_private.SHOWS_SAVED or is_packed:
                    for reference in self._of_saved(saved, values[:following]):
                        if reference.value is not None:
                            in_python |= {len(values)} if reference.in_python else set()
                            values.append(reference.value)
                else:
                    unpacked = _of_unpacked(node, name, index if several else None)
                    values += [it.value for it in unpacked if it.value is not None]
        return values, in_python

    def _of_saved(self, saved: Any, following: list[Any]) -> Iterator[_Reference]:
        """Yield a saved tensor, or what a hook of ``saved_tensors_hooks`` has packed for it.

        Then the hook follows, and the node of the tensor that was packed, one of `following`.
        """
        if not torch_keepers.is_packed(saved):
            yield _Reference(saved.data)
            return
        address = torch_keepers.node_of_packed(saved)
        of_address = (it for it in following if torch_keepers.address_of_node(it) == address)
        yield _Reference(next(of_address, None))
        if torch_private.SHOWS_SAVED:
            yield _Reference(saved.data, in_python=True)
            yield _Reference(saved.unpack_hook, in_python=True)
            yield _Reference(torch_keepers.pack_hook_of(saved), in_python=True)
        else:
            self._is_complete = False  # to read it would run the hook


def _is_lazy_clone(tensor: torch.Tensor) -> bool:
    try:
        return torch_private.is_lazy_clone(tensor)
    except (NotImplementedError, RuntimeError):  # it has no storage, or only its parts have
        return False


def _has_hidden_parts(tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps more alive than its storage and its base, which Python does not show.

    A view that is not a strided part of its base, such as a conjugate, has a function in C++ that
    makes it again, with tensors of its own.
    """
    with torch_private.no_subclass_function():
        base = torch_private.base_of(tensor)
        is_other_view = base is not None and (
            base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg()
        )
        return is_other_view or tensor.is_quantized or tensor.is_nested or tensor.is_mkldnn


def _calls_back(value: Any) -> bool:
    """Whether something is called, and may drop more, when an object is freed."""
    return any(
        issubclass(type(reference), weakref.ref)  # not a proxy, which would answer for its object
        and reference.__callback__ is not None
        # Callbacks of Dynamo drop nothing more: they forget a number that it keeps of a module.
        and not str(getattr(reference.__callback__, "__module__", "")).startswith(
            torch_keepers.DYNAMO
        )
        for reference in weakref.getweakrefs(value)
    )


def _of_array(array: Any) -> Iterator[_Reference]:
    numpy = sys.modules["numpy"]
    yield _Reference(numpy.ndarray.base.__get__(array), in_python=True)
    if numpy.ndarray.dtype.__get__(array).hasobject:
        for value in numpy.ndarray.flat.__get__(array):
            yield _Reference(value, in_python=True)


def _of_unpacked(node: Any, name: str, index: int | None) -> Iterator[_Reference]:
    """Yield a tensor that a node has saved, before torch 2.10.

    Of a result of the node, only a copy can be read: another tensor with the same storage.
    """
    try:
        saved = getattr(node, torch_keepers.unpacked_name(name))
    except RuntimeError:  # it was modified since
        return
    tensor = saved if index is None else saved[index]
    del saved
    if tensor is not None and torch_keepers.tensor_uses(tensor).cpp == 0:
        yield from map(_Reference, storages_of(tensor))  # that of what is saved
    yield _Reference(tensor)
