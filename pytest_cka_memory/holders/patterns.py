"""Which storages are held in the same way: by entries of one container, or by parts of one graph.

The way is a number, so that to group a million storages writes no expression for each.
"""

from collections import deque

from pytest_cka_memory.holders.expressions import is_own_dict, text_of, without_places
from pytest_cka_memory.holders.tree import Reference, ReferenceTree

_ENTRY = "[]"
_OF_GRAPH = ".grad_fn"
_OF_MODULES = {"._parameters", "._buffers", "._modules"}
"""Attributes of a module whose keys are names of attributes, too."""
_CONTAINERS = (list, tuple, deque, set, frozenset)


class Patterns:
    """Numbers the ways in which the objects of a tree are held.

    Keys and indices do not count, nor how often the same step follows itself, as in a linked list.
    Everything that the graph of one tensor holds is equal: each batch may make a part of the graph.
    """

    def __init__(self, tree: ReferenceTree) -> None:
        self._tree = tree
        self._known: dict[int, int] = {}
        """By the identity of an object that leads to others, its number."""
        self._numbers: dict[tuple[int, object], int] = {}
        """By the number of what leads to it and the last step."""
        self._steps: list[object] = [None]
        """By number, the last step."""
        self._of_entries: dict[int, int] = {}
        """By the identity of a container, the number of what is an entry of it."""
        self._are_entries: dict[int, bool] = {}
        """By the identity of a dict, whether its keys are no names of attributes."""

    def of(self, last: Reference) -> int:
        """Return a number that is equal for objects that are held in the same way."""
        number = self._of_entries.get(id(last.parent), 0)
        if number:
            return number
        inner = []
        step = self._tree.before(last)
        while step is not None:
            known = self._known.get(id(step.value))
            if known is not None:
                number = known
                break
            inner.append(step)
            step = self._tree.before(step)
        for step in reversed(inner):
            number = self._known[id(step.value)] = self._then(number, step)
        found = self._then(number, last)
        if last.text is None and self._is_entry(last):
            self._of_entries[id(last.parent)] = found
        return found

    def _then(self, number: int, step: Reference) -> int:
        """Return the number for what `step` leads to, if `number` is that of its parent."""
        part = self._part(step)
        before = self._steps[number]
        if not part or (before == part and part is not None) or before == _OF_GRAPH:
            return number
        found = self._numbers.setdefault((number, part), len(self._steps))
        if found == len(self._steps):
            self._steps.append(part)
        return found

    def _part(self, step: Reference) -> object:
        if step.parent is None:
            return self._tree.start(step)
        if step.text is not None:
            return without_places(step.text)
        if self._is_entry(step):
            return _ENTRY
        if is_own_dict(step.value, step.parent):
            return ""
        if type(step.parent) is dict:  # the attributes of an object
            return "." + without_places(text_of(step.parent, step.value)[2:-2])
        return without_places(text_of(step.parent, step.value))

    def _is_entry(self, step: Reference) -> bool:
        """Whether a step leads from a container to an entry: not to an attribute of an object."""
        kind = type(step.parent)
        return kind in _CONTAINERS or (kind is dict and self._has_entries(step))

    def _has_entries(self, step: Reference) -> bool:
        known = self._are_entries.get(id(step.parent))
        if known is None:
            before = self._tree.before(step)
            owner = None if before is None else before.parent
            known = owner is None or not (
                is_own_dict(step.parent, owner)
                or (before is not None and self._part(before) in _OF_MODULES)
            )
            self._are_entries[id(step.parent)] = known
        return known
