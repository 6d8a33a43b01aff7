"""Which storages would be freed if garbage was: those that only garbage keeps alive.

The collector sees what Python objects reference. Tensors, storages and autograd nodes reference
each other in C++, too: each of them is freed with the last of its references in both languages. So
all references are counted that end with the garbage, and compared with those that there are.
Nothing is freed for it.
"""

import datetime
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.meters import cpp_counts, torch_keepers, torch_private
from pytest_cka_memory.meters.blocks.python_objects import CompiledRelease
from pytest_cka_memory.meters.objects import grad_fn_of, gradient_of, is_node, storages_of


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


class _Release:
    """What loses references because garbage is freed. Lives only for one search."""

    def __init__(self, garbage: Sequence[Any]) -> None:
        numpy = sys.modules.get("numpy")
        self._array: type = _NoType if numpy is None else numpy.ndarray
        bases = (torch.Tensor, torch_private.FUNCTION_BASE, self._array, *_OTHERS, *_OPAQUE)
        self._python = CompiledRelease(garbage, bases, cpp_counts.type_of_nodes())
        self._met: dict[int, Any] = {}
        """By identity, objects that have lost references; so that no other gets that identity."""
        self._lost_in_cpp: Counter[int] = Counter()
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
            # What adds up a leaf's gradient is used by the graphs of all steps, and has no memory.
            if ident in self._freed or hasattr(type(value), "variable"):
                continue
            if self._python.left(ident) <= self._uses(value).python:
                yield ident

    def _free_unused(self, candidates: list[Any]) -> None:
        """Free those that have lost all references, and what then has lost all of its own."""
        while candidates:
            value = candidates.pop()
            if id(value) in self._freed or not self._is_unused(value):
                continue
            self._freed.add(id(value))
            if type(value) is torch.UntypedStorage:
                self._storages.append(value)
            self._python.free(id(value))
            candidates += self._lose_references(value)

    def _is_unused(self, value: Any) -> bool:
        uses = self._uses(value)
        in_python = self._python.left(id(value)) - uses.python
        return uses.cpp <= self._lost_in_cpp[id(value)] and in_python <= 0

    def _uses(self, value: Any) -> cpp_counts.Uses:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            return cpp_counts.tensor_uses(value)
        if kind is torch.UntypedStorage:
            return cpp_counts.storage_uses(value)
        if is_node(kind):
            return cpp_counts.node_uses(value) or _UNKNOWN
        return cpp_counts.Uses(cpp=0, python=0)

    def _lose_references(self, value: Any) -> list[Any]:
        """Let all that an object references, and the collector does not see, lose a reference.

        Returns:
            What has lost one of C++.
        """
        values, in_python = self._references_of(value)
        self._python.note(values)
        for place, is_of_python in enumerate(in_python):
            ident = id(values[place])
            if is_of_python:
                self._python.lose(ident)
            else:
                self._met[ident] = values[place]
                self._lost_in_cpp[ident] += 1
        return [values[place] for place, is_of_python in enumerate(in_python) if not is_of_python]

    def _references_of(self, value: Any) -> tuple[list[Any], list[bool]]:
        """Return what an object references, and which of these references count in Python.

        When this has returned, nothing else of this search references a new one of them.
        """
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            references = self._of_tensor(value)
        elif issubclass(kind, self._array):
            references = _of_array(value)
            self._is_complete &= _fields_of(value) is None
        elif kind in torch_private.SAVED_TENSORS:  # one that belongs to no node
            references = self._of_saved(value, [])
        elif kind is torch.UntypedStorage:
            references = iter(())
        elif issubclass(kind, _OPAQUE):
            references = iter(())
            self._is_complete = False
        else:
            references = self._of_node(value)
        values: list[Any] = []
        in_python: list[bool] = []
        for reference in references:
            if reference.value is not None:
                values.append(reference.value)
                in_python.append(reference.in_python)
        return values, in_python

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

    def _of_node(self, node: Any) -> Iterator[_Reference]:
        depth = self._depths.get(id(node), 0)
        if depth >= _DEEPEST or type(node).__name__ in _OPAQUE_NODES:
            self._is_complete = False
            return
        following = [found for found, _ in node.next_functions if found is not None]
        for found in following:
            self._depths[id(found)] = max(self._depths.get(id(found), 0), depth + 1)
        yield from map(_Reference, following)
        yield _Reference(getattr(node, "variable", None))  # the leaf, of a node that has one
        for name in torch_keepers.raw_saved(type(node)):
            try:
                raw = getattr(node, name)
            except RuntimeError:  # the backward pass has freed it
                continue
            several = isinstance(raw, tuple)
            for index, saved in enumerate(raw if several else (raw,)):
                if torch_private.SHOWS_SAVED or cpp_counts.is_packed(saved):
                    yield from self._of_saved(saved, following)
                else:
                    yield from _of_unpacked(node, name, index if several else None)

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


def _fields_of(array: Any) -> Any:
    """Return the fields of the records in an array; None if it has other elements."""
    return sys.modules["numpy"].ndarray.dtype.__get__(array).fields


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
