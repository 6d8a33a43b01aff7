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
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.meters import cpp_counts, torch_keepers, torch_private
from pytest_cka_memory.meters.blocks.python_objects import CompiledRelease
from pytest_cka_memory.meters.objects import (
    NO_STORAGE,
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
    """How many objects the search had to ask for references in C++."""
    waiting: frozenset[int]
    """Identities of objects that have lost all references of Python, but not those of C++."""


def freed_with(garbage: Sequence[Any]) -> Freed:
    """Return what is freed with `garbage`, the objects of a census."""
    if not garbage:
        return Freed([], is_complete=True, followed=0, waiting=frozenset())
    with torch_private.no_torch_function():  # the user's modes must not see these calls
        return _Release(garbage).freed()


class _Reference(NamedTuple):
    """A reference to an object, which counts in Python or in C++."""

    value: Any
    in_python: bool = False


_UNKNOWN = cpp_counts.Uses(cpp=2**31, python=0)
"""For an object whose references cannot be counted: so many that it always counts as in use."""
_ONLY_PYTHON = cpp_counts.Uses(cpp=0, python=0)


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


_node_kinds: weakref.WeakKeyDictionary[type, _NodeKind | None] = weakref.WeakKeyDictionary()
"""What is known of types; None for one that is not that of a node. A loop frees the same types of
objects in each batch, and to ask for this takes longer than to follow one of them."""


def _node_kind(kind: type) -> _NodeKind | None:
    """Return what nodes of a type have in common; None if it is not a type of nodes."""
    may_be_key = type(kind) is type  # the metaclass of a user may compare and hash in Python
    if may_be_key and kind in _node_kinds:
        return _node_kinds[kind]
    found = None
    if is_node(kind):
        # Not an attribute of that name which a user's own function sets.
        has_leaf = type(getattr(kind, "variable", None)) is types.GetSetDescriptorType
        found = _NodeKind(torch_keepers.raw_saved(kind), has_leaf, kind.__name__ in _OPAQUE_NODES)
    if may_be_key:
        _node_kinds[kind] = found
    return found


class _Release:
    """What loses references because garbage is freed. Lives only for one search."""

    def __init__(self, garbage: Sequence[Any]) -> None:
        numpy = sys.modules.get("numpy")
        self._array: type = _NoType if numpy is None else numpy.ndarray
        bases = (torch.Tensor, torch_private.FUNCTION_BASE, self._array, *_OTHERS, *_OPAQUE)
        self._python = CompiledRelease(garbage, bases, cpp_counts.type_of_nodes())
        self._met: dict[int, Any] = {}
        """By identity, objects that have lost references; so that no other gets that identity."""
        self._lost_in_cpp: dict[int, int] = {}
        self._freed: set[int] = set()
        self._storages: list[torch.UntypedStorage] = []
        self._is_complete = not any(map(_calls_back, garbage))
        self._depths: dict[int, int] = {}
        """By identity, how deep a node is below the garbage."""

    def freed(self) -> Freed:
        """Follow all references and return what has lost all of its own."""
        found = self._python.found  # grows
        for place, value in enumerate(found):
            found[place] = None
            self._met[id(value)] = value
            self._free_unused([value])
        return Freed(self._storages, self._is_complete, len(self._met), frozenset(self._waiting()))

    def _waiting(self) -> Iterator[int]:
        for ident, value in self._met.items():
            if ident in self._freed:
                continue
            # What adds up a leaf's gradient is used by the graphs of all steps, and has no memory.
            node_kind = _node_kind(type(value))
            if node_kind is not None and node_kind.has_leaf:
                continue
            if self._python.left(ident) <= self._uses(value).python:
                yield ident

    def _free_unused(self, candidates: list[Any]) -> None:
        """Free those that have lost all references, and what then has lost all of its own."""
        while candidates:
            value = candidates.pop()
            ident = id(value)
            if ident in self._freed or not self._is_unused(value):
                continue
            self._freed.add(ident)
            if type(value) is torch.UntypedStorage:
                self._storages.append(value)
            self._python.free(ident)
            candidates += self._lose_references(value)

    def _is_unused(self, value: Any) -> bool:
        ident = id(value)
        uses = self._uses(value)
        if uses.cpp > self._lost_in_cpp.get(ident, 0):
            return False
        return self._python.left(ident) <= uses.python

    def _uses(self, value: Any) -> cpp_counts.Uses:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            return cpp_counts.tensor_uses(value)
        if kind is torch.UntypedStorage:
            return cpp_counts.storage_uses(value)
        if _node_kind(kind) is not None:
            return cpp_counts.node_uses(value) or _UNKNOWN
        return _ONLY_PYTHON

    def _lose_references(self, value: Any) -> list[Any]:
        """Let all that an object references, and the collector does not see, lose a reference.

        Returns:
            What has lost one of C++.
        """
        values, in_python = self._references_of(value)
        if not values:
            return values
        self._python.note(values)
        met, lost = self._met, self._lost_in_cpp
        for place, referenced in enumerate(values):
            ident = id(referenced)
            if place in in_python:
                self._python.lose(ident)
            else:
                met[ident] = referenced
                lost[ident] = lost.get(ident, 0) + 1
        return [it for place, it in enumerate(values) if place not in in_python]

    def _references_of(self, value: Any) -> tuple[list[Any], Collection[int]]:
        """Return what an object references, and at which places those that count in Python are.

        When this has returned, nothing else of this search references a new one of them.
        """
        kind = type(value)
        if kind in PLAIN_TENSORS and (plain := _of_plain_tensor(value)) is not None:
            return plain, ()
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
        depth = self._depths.get(id(node), 0)
        if kind is None or kind.is_opaque or depth >= _DEEPEST:
            self._is_complete = False
            return [], ()
        values = [found for found, _ in node.next_functions if found is not None]
        for found in values:
            self._depths[id(found)] = max(self._depths.get(id(found), 0), depth + 1)
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
                is_packed = cpp_counts.is_packed(saved)
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
        if not cpp_counts.is_packed(saved):
            yield _Reference(saved.data)
            return
        address = cpp_counts.node_of_packed(saved)
        of_address = (it for it in following if cpp_counts.address_of_node(it) == address)
        yield _Reference(next(of_address, None))
        if torch_private.SHOWS_SAVED:
            yield _Reference(saved.data, in_python=True)
            yield _Reference(saved.unpack_hook, in_python=True)
            yield _Reference(cpp_counts.pack_hook_of(saved), in_python=True)
        else:
            self._is_complete = False  # to read it would run the hook


def _of_plain_tensor(tensor: torch.Tensor) -> list[Any] | None:
    """Return what a tensor of torch's own types references, in a fraction of the time.

    None if it is a view or has no plain storage. To read the others runs no operator and calls
    nothing of the user's, so nothing has to be kept from seeing it.
    """
    if tensor.layout is not torch.strided or torch_private.base_of(tensor) is not None:
        return None
    if tensor.is_quantized or tensor.is_nested or _is_lazy_clone(tensor):
        return None
    try:
        values: list[Any] = [plain_storage_of(tensor)]
        node = tensor.grad_fn
        # Reading .grad of any other tensor prints a warning.
        gradient = tensor.grad if node is None or tensor.retains_grad else None
    except NO_STORAGE:
        return None
    if node is not None:
        values.append(node)
    if gradient is not None:
        values.append(gradient)
    return values


def _is_lazy_clone(tensor: torch.Tensor) -> bool:
    try:
        return torch_private.is_lazy_clone(tensor)
    except (NotImplementedError, RuntimeError):  # it has no storage, or only its parts have
        return False


def _has_hidden_parts(tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps more alive than its storage and its base, which Python does not show.

    A view that is no strided part of its base, such as a conjugate, has a function in C++ that
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
    return weakref.getweakrefcount(value) > 0 and any(
        issubclass(type(reference), weakref.ref)  # not a proxy, which would answer for its object
        and reference.__callback__ is not None
        # Dynamo notes a number for each module.
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
    if tensor is not None and cpp_counts.tensor_uses(tensor).cpp == 0:
        yield from map(_Reference, storages_of(tensor))  # that of what is saved
    yield _Reference(tensor)
