"""Find what references an object: a forward search from everything that a program can name.

The search goes forward because one pass finds all objects that are looked for; a backward search
costs about as much for each of them. Objects are distinguished by their type only, because reading
an attribute of an unknown object may run code, print a warning or raise.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from pytest_cka_memory.holders.by_type import ByType
from pytest_cka_memory.holders.roots import Root, globals_of, modules
from pytest_cka_memory.holders.tree import Reference, ReferenceTree, without_broken
from pytest_cka_memory.holders.walk import Walk, new_walk

_LATE_ROOTS_DEPTH = 3
_AT_ONCE = 10_000
"""Objects after which types without rules are called plain."""


@dataclass(frozen=True)
class TypeRules:
    """How the search treats the objects of one type."""

    keys: Callable[[Any], Collection[int]] = lambda _: ()
    """Which keys an object has: the storages that it is or contains."""
    extra_references: Callable[[Any], Iterable[tuple[str, Any]]] = lambda _: ()
    """References that the garbage collector does not see or cannot name: (text, object) pairs."""


RulesForType = Callable[[type], TypeRules | None]
"""Returns the rules for a type; None if what the garbage collector sees is all."""


class Found(NamedTuple):
    """What a search has found."""

    tree: ReferenceTree
    """The references from a root to each object that has a key which was found."""
    walk: Walk
    """All objects that were met; everything that names lead to if a key is missing."""


def search(
    rules_for: RulesForType,
    wanted: Collection[int],
    roots: Collection[Root],
    late_roots: Collection[Root],
    avoided: Iterable[Any] = (),
    step: Callable[[], None] = lambda: None,
) -> Found:
    """Find a short path to each wanted key.

    Args:
        rules_for: returns which keys the objects of a type have, and their extra references.
        wanted: the keys to find.
        roots: where to start. Modules and their globals are entered only as roots, so that no
            path leads through an import.
        late_roots: names that users rarely type; they are entered a few levels later.
        avoided: objects through which no path leads.
        step: called after every 10,000 objects.
    """
    imported = list(modules().values())
    excluded = [*avoided, *imported, *map(globals_of, imported)]
    levels = _Levels(rules_for, wanted, excluded, step)
    levels.enter_roots(roots)
    depth = 0
    while not levels.has_all and (levels.has_more or depth < _LATE_ROOTS_DEPTH):
        levels.advance()
        depth += 1
        if depth == _LATE_ROOTS_DEPTH:
            levels.enter_roots(late_roots)
    return Found(levels.tree(), levels.walk)


class _Levels:
    """All objects that were met so far, by their distance from the roots.

    Which object led to which is not recorded, because that would cost more than the rest of the
    search: `tree` finds it again, backwards, for the few objects that matter.
    """

    def __init__(
        self,
        rules_for: RulesForType,
        wanted: Collection[int],
        excluded: Iterable[Any],
        step: Callable[[], None],
    ) -> None:
        self._step = step
        self._wanted = wanted if isinstance(wanted, (Set, Mapping)) else frozenset(wanted)
        self.walk = new_walk()
        """Begins with the excluded objects."""
        self.walk.enter([*excluded])
        self._rules = ByType(rules_for)
        for kind in (dict, list, tuple):  # most objects, already when the first are met
            if self._rules[kind] is None:
                self.walk.add_plain(kind)
        self._starts = [len(self.walk)]
        """The number of the first object at each distance."""
        self._entered: dict[int, tuple[Collection[Root], int]] = {}
        """By distance, roots whose values were added there, and how many objects came before."""
        self._references: dict[int, Reference] = {}
        """By the id of the object; only the extra ones, which gc does not see."""
        self._pending: list[Reference] = []
        """Extra references from the last level."""
        self._found: dict[int, Any] = {}
        self._found_at: defaultdict[int, list[Any]] = defaultdict(list)

    @property
    def has_all(self) -> bool:
        """Whether all wanted keys were found."""
        return len(self._found) == len(self._wanted)

    @property
    def has_more(self) -> bool:
        """Whether there are objects at the largest distance so far."""
        return len(self.walk) > self._starts[-1]

    def enter_roots(self, roots: Collection[Root]) -> None:
        """Add the values of `roots` to the last level."""
        self._entered[len(self._starts) - 1] = roots, len(self.walk)
        self._enter([*chain.from_iterable(root.names.values() for root in roots)])

    def advance(self) -> None:
        """Add a level with everything that the last level references."""
        first, end = self._starts[-1], len(self.walk)
        self._starts.append(end)
        pending, self._pending = self._pending, []
        new = [reference for reference in pending if reference.value not in self.walk]
        for reference in new:
            self._references.setdefault(id(reference.value), reference)
        self._enter([reference.value for reference in new])
        for start in range(first, end, _AT_ONCE):
            self._apply_rules(self.walk.follow(start, min(start + _AT_ONCE, end)))
            self._step()

    def _enter(self, values: list[Any]) -> None:
        for start in range(0, len(values), _AT_ONCE):
            self._apply_rules(self.walk.enter(values[start : start + _AT_ONCE]))

    def _apply_rules(self, values: Iterable[Any]) -> None:
        """Look for keys in new objects of the last level, and for references gc does not see."""
        wanted, found, rules_of = self._wanted, self._found, self._rules
        for value in values:
            rules = rules_of[type(value)]
            if rules is None:
                self.walk.add_plain(type(value))
                continue
            for key in rules.keys(value):
                if key in wanted and key not in found:
                    found[key] = value
                    self._found_at[len(self._starts) - 1].append(value)
            for text, child in rules.extra_references(value):
                self._pending.append(Reference(child, value, None, text))

    def tree(self) -> ReferenceTree:
        """Return the references that lead to everything found so far."""
        references, self._references = self._references, {}
        parents: dict[int, Any] = {}
        is_complete = True
        for distance in reversed(range(len(self._starts))):
            needed = [*self._found_at.pop(distance, ()), *parents.values()]
            left = [value for value in needed if id(value) not in references]
            if distance in self._entered:
                references.update(self._references_from_roots(distance, left))
                left = [value for value in left if id(value) not in references]
            if left and distance:
                first, end = self._starts[distance - 1 : distance + 1]
                for value, parent in self.walk.parents(first, end, left):
                    references[id(value)] = Reference(value, parent)
            del left
            parents = {}
            for value in needed:
                reference = references.get(id(value))
                if reference is None:  # another thread has removed it meanwhile
                    is_complete = False
                elif reference.parent is not None:
                    parents[id(reference.parent)] = reference.parent
        holders = self._found if is_complete else without_broken(references, self._found)
        return ReferenceTree(references, holders)

    def _references_from_roots(self, distance: int, wanted: Iterable[Any]) -> dict[int, Reference]:
        """Return the first reference from a root to each of `wanted` that was added as its value.

        Most values of roots lead to nothing that is looked for, so this is done afterwards.
        """
        roots, first = self._entered[distance]
        end = [*self._starts, len(self.walk)][distance + 1]
        unknown = {*map(id, wanted)} & {*map(id, self.walk[first:end])}
        found: dict[int, Reference] = {}
        for root in roots if unknown else ():
            for name, value in root.names.items():
                if id(value) in unknown:
                    found.setdefault(id(value), Reference(value, None, root, name))
        return found
