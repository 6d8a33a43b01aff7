"""Prove by reference counts that a named reference is the only one that keeps a storage alive.

Nothing is deleted for the proof: a storage is freed with its last tensor, and a tensor with the
last reference to it. If all of these are counted and there is only one, then deleting that one
frees the storage.
"""

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from pytest_cka_memory.holders import Reference, ReferencePath, ReferenceTree, Root
from pytest_cka_memory.holders.search import RulesForType, TypeRules, search
from pytest_cka_memory.meters.objects import is_only_tensor

Roots = Callable[[], tuple[list[Root], list[Root]]]
"""Returns the names of users, and those of installed code."""

_FIXED = (tuple, frozenset)
_FIXED_KINDS = (
    types.CellType,
    types.FunctionType,
    types.MethodType,
    types.FrameType,
    types.TracebackType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
)
"""Types whose objects reference others, but not in a way that a user deletes."""
_MOST_SEARCHES = 3
"""Searches for other references to tensors in all, because each takes as long as the first; and as
many for those to the objects that tensors are in."""


class Proofs:
    """Which storages one named reference keeps alive, and what else does.

    Args:
        trees: all references that were found. Nothing else may reference the objects while this is
            in use, because references are counted.
    """

    def __init__(self, *trees: ReferenceTree) -> None:
        self._searches_left = {"tensor": _MOST_SEARCHES, "object": _MOST_SEARCHES}
        self._tree = trees[0]
        self._own: Counter[int] = Counter()
        """By identity, how often an object is referenced by `trees`, besides the reference by which
        it was met. One that is not here has one key if a path ends at it, and none otherwise: so a
        million tensors in a list need no number each."""
        roots: dict[int, Root] = {}
        for tree in trees:
            self._own.update(id(reference.parent) for reference in tree.references)
            roots |= {
                id(reference.root): reference.root
                for reference in tree.references
                if reference.root
            }
        for root in roots.values():
            self._own.update(map(id, root.names.values()))
        for tree in trees:
            for identity, keys in Counter(map(id, tree.holders)).items():
                if keys > 1 or identity in self._own:
                    self._own[identity] += keys

    def is_only_reference(self, last: Reference) -> bool:
        """Whether a storage is freed with a reference that users delete, on the path to `last`."""
        if not is_only_tensor(last.value):
            return False
        for reference in self._tree.upwards(last):
            is_of_cpp = reference.root is None and reference.text is not None
            if is_of_cpp or self._others(reference, is_last=reference is last) != 0:
                return False
            if reference.root is not None or _is_changeable(reference.parent):
                return True
        return False

    def other_paths(
        self, path: ReferencePath, roots: Roots, kind: Literal["tensor", "object"] = "tensor"
    ) -> list[ReferencePath]:
        """Return the other paths to the object at the end of `path`, from roots.

        Each takes a search, so that only few are made in all. They find also what the collector
        does not know as a referrer, such as the local variables of running functions.

        Args:
            path: the references from a root to it.
            roots: returns all names, those of users first.
            kind: whether that is a tensor or what a tensor is in.
        """
        missing = self._others(path[-1], is_last=True)
        if missing <= 0 or _is_of_cpp(path):
            return []
        value = path[-1].value
        known: list[ReferencePath] = [path]
        others: list[ReferencePath] = []
        while missing > len(others) and self._searches_left[kind] > 0:
            self._searches_left[kind] -= 1
            avoided = [
                reference.parent for each in known if (reference := each[-1]).parent is not None
            ]
            early, late = (_without(known, value, group) for group in roots())
            other = search(_rules_for(value), [id(value)], early, late, avoided).tree
            if id(value) not in other:
                break
            known.append(other.path(id(value)))
            others.append(known[-1])
        return others

    def _others(self, reference: Reference, *, is_last: bool) -> int:
        """Return how many references an object has besides that of a path; 0 if it has no other."""
        own = self._own.get(id(reference.value), int(is_last))
        # One for the argument of getrefcount, one for `reference`, one for that of the path.
        return sys.getrefcount(reference.value) - 3 - own


def is_removable(value: Any) -> bool:
    """Whether a user can remove references to an object: not those to a class or a cell."""
    return not issubclass(type(value), (type, types.CellType, types.FrameType))


def _is_changeable(parent: Any) -> bool:
    return not issubclass(type(parent), _FIXED) and type(parent) not in _FIXED_KINDS


def _is_of_cpp(path: ReferencePath) -> bool:
    return path[-1].root is None and path[-1].text is not None


def _without(known: Sequence[ReferencePath], value: Any, roots: Iterable[Root]) -> list[Root]:
    """Return roots without the names by which paths that are known lead to an object."""
    named = {
        (reference.root.prefix, reference.root.suffix, reference.text)
        for reference, *rest in known
        if reference.root is not None and not rest
    }
    remaining = []
    for root in roots:
        names = {
            name: it
            for name, it in root.names.items()
            if it is not value or (root.prefix, root.suffix, name) not in named
        }
        remaining.append(root if len(names) == len(root.names) else replace(root, names=names))
    return remaining


def _rules_for(wanted: Any) -> RulesForType:
    """Return rules by which a search finds an object, with its identity as its key."""
    rules = TypeRules(keys=lambda value: (id(value),))
    return lambda kind: rules if kind is type(wanted) else None
