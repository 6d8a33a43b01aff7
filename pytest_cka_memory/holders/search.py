"""Find what references an object: a forward search from everything that a program can name.

The search goes forward because one pass finds all objects that are looked for; a backward search
costs about as much for each of them. Objects are distinguished by their type only, because reading
an attribute of an unknown object may run code, print a warning or raise.

The walk over the objects is in C if the compiled library is here, which takes a fraction of the
time, else in Python.
"""

import gc
import os
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, compress, filterfalse
from operator import not_
from typing import Any, NamedTuple, Protocol, TypeVar

from pytest_cka_memory.holders import (
    Reference,
    ReferenceTree,
    Root,
    globals_of,
    modules,
    without_broken,
)
from pytest_cka_memory.meters.blocks import SWITCH
from pytest_cka_memory.meters.blocks.python_objects import CompiledWalk

Value = TypeVar("Value")


class ByType(dict[type, Value]):
    """What a function returns for each type.

    ``map(values.__getitem__, map(type, objects))`` runs no Python code for an object of a type that
    is known, which matters if there are millions.
    """

    __slots__ = ("_compute",)

    def __init__(self, compute: Callable[[type], Value]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, kind: type) -> Value:
        value = self[kind] = self._compute(kind)
        return value


LEAVES = frozenset(
    {str, bytes, bytearray, int, float, complex, bool, type(None), type(...), range}
    | {types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType}
    | {types.GetSetDescriptorType, types.MemberDescriptorType}
)
"""Types whose objects reference nothing of interest."""
_AT_ONCE = 10_000
"""Objects that are visited together: few enough for the caches of a processor."""


class Walk(Protocol):
    """The objects that were met so far, numbered in the order in which they were met.

    All are kept alive, because the id of a freed object may be used again. Objects that lead
    nowhere and are not tracked by the collector may be left out, and of those that were not met,
    objects of plain types that lead only to what was.
    """

    def __len__(self) -> int:
        """Return how many objects were met."""
        ...

    def __contains__(self, value: object) -> bool:
        """Whether an object was met."""
        ...

    def __getitem__(self, numbers: slice) -> list[Any]:
        """Return the objects with these numbers."""
        ...

    def enter(self, values: list[Any]) -> list[Any]:
        """Meet `values`, and return those that are new and of a type that is not called plain."""
        ...

    def follow(self, first: int, end: int) -> list[Any]:
        """Do the same with all that the objects from number `first` to `end` reference."""
        ...

    def add_plain(self, kind: type) -> None:
        """Call a type plain: of its objects, only what they reference is of interest."""
        ...

    def parents(self, first: int, end: int, wanted: list[Any]) -> Iterable[tuple[Any, Any]]:
        """Return each object of `wanted` that is referenced, and the first that references it.

        Args:
            first: the number of the first object that may reference one.
            end: the number after that of the last.
            wanted: the objects whose parents are looked for.
        """
        ...

    def unmet(self) -> list[Any]:
        """Return what the collector tracks and was not met, but not the walk itself."""
        ...

    def unmet_referents(self, value: Any) -> list[Any]:
        """Return the objects that `value` references and that were not met."""
        ...


def new_walk() -> Walk:
    """Return a walk that has met nothing."""
    compiled = None if os.environ.get(SWITCH) == "0" else CompiledWalk.begin([*LEAVES])
    return PythonWalk() if compiled is None else compiled


class PythonWalk:
    """A walk without a step in Python for each object, except for those of types with rules."""

    __slots__ = ("_idents", "_is_special", "_leads_on", "_met")

    def __init__(self) -> None:
        self._met: list[Any] = []
        self._idents: set[int] = set()
        # Not methods, which would make a cycle: the objects must be freed with the walk.
        self._leads_on = ByType(lambda kind: kind not in LEAVES)
        self._is_special = ByType(lambda _: True)

    def __len__(self) -> int:
        return len(self._met)

    def __contains__(self, value: object) -> bool:
        return id(value) in self._idents

    def __getitem__(self, numbers: slice) -> list[Any]:
        return self._met[numbers]

    def enter(self, values: list[Any]) -> list[Any]:
        """Meet `values`, and return those that are new and of a type that is not called plain."""
        parts = (values[first : first + _AT_ONCE] for first in range(0, len(values), _AT_ONCE))
        return [special for part in parts for special in self._enter_part(part)]

    def follow(self, first: int, end: int) -> list[Any]:
        """Do the same with all that the objects from number `first` to `end` reference."""
        return self.enter(gc.get_referents(*self._met[first:end]))

    def add_plain(self, kind: type) -> None:
        """Call a type plain: of its objects, only what they reference is of interest."""
        self._is_special[kind] = False

    def parents(self, first: int, end: int, wanted: list[Any]) -> Iterable[tuple[Any, Any]]:
        """Return each object of `wanted` that is referenced, and the first that references it."""
        left = {id(value): value for value in wanted}
        pairs: list[tuple[Any, Any]] = []
        for parent in self._met[first:end]:
            for ident in left.keys() & map(id, gc.get_referents(parent)):
                pairs.append((left.pop(ident), parent))
            if not left:
                break
        return pairs

    def unmet(self) -> list[Any]:
        """Return what the collector tracks and was not met, but not the walk itself."""
        own = {id(self), id(self._met), id(self._idents)}
        return [it for it in self._unmet(gc.get_objects()) if id(it) not in own]

    def unmet_referents(self, value: Any) -> list[Any]:
        """Return the objects that `value` references and that were not met."""
        return self._unmet(gc.get_referents(value))

    def _unmet(self, values: list[Any]) -> list[Any]:
        met = map(self._idents.__contains__, map(id, values))
        new = [*compress(values, map(not_, met))]
        return [*compress(new, map(self._leads_on.__getitem__, map(type, new)))]

    def _enter_part(self, values: Sequence[Any]) -> list[Any]:
        kept = [*compress(values, map(self._leads_on.__getitem__, map(type, values)))]
        kept = self._without_plain_data(kept)
        new = dict(zip(map(id, kept), kept, strict=True))
        for ident in new.keys() & self._idents:
            del new[ident]
        self._idents.update(new)
        self._met.extend(new.values())
        kinds = map(type, new.values())
        return [*compress(new.values(), map(self._is_special.__getitem__, kinds))]

    def _without_plain_data(self, values: list[Any]) -> list[Any]:
        """Drop values that the collector does not track, if nothing that they reference matters.

        Such are dicts and tuples of numbers and strings, of which there may be very many. To look
        into all of one part together takes less time than to remember each.
        """
        untracked = [*filterfalse(gc.is_tracked, values)]
        if 2 * len(untracked) < len(values):  # to drop so few would not pay for the look
            return values
        kinds = set(map(type, untracked))
        children = set(map(type, gc.get_referents(*untracked)))
        if any(map(self._is_special.__getitem__, kinds)) or not LEAVES.issuperset(children):
            return values
        return [*filter(gc.is_tracked, values)]


_LATE_ROOTS_DEPTH = 3
"""How many references a path from a name of the user's may be longer than one from a name of
installed code, and is still preferred."""
_OBJECTS_AT_ONCE = 10_000
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


class SearchResult(NamedTuple):
    """The paths that a search has found, and the objects that it has met."""

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
    on_progress: Callable[[], None] = lambda: None,
) -> SearchResult:
    """Find a short path to each wanted key.

    If several objects hold a tensor, this decides which of them a message names as ``held_by``: the
    one with the fewest references from a name, and of several such ones the first in the order of
    `roots`. The others, ``also_held_by``, are found by ``other_paths`` in :mod:`.proof`.

    Args:
        rules_for: returns which keys the objects of a type have, and their extra references.
        wanted: the keys to find.
        roots: where to start. Modules and their globals are entered only as roots, so that no
            path leads through an import.
        late_roots: names that users rarely type; they are entered a few levels later.
        avoided: objects through which no path leads.
        on_progress: called after every 10,000 objects.

    Returns:
        The paths to the keys that objects have, and all objects that were met.
    """
    imported = list(modules().values())
    excluded = [*avoided, *imported, *map(globals_of, imported)]
    levels = _Levels(rules_for, wanted, excluded, on_progress)
    levels.enter_roots(roots)
    depth = 0
    while not levels.has_all and (levels.has_more or depth < _LATE_ROOTS_DEPTH):
        levels.advance()
        depth += 1
        if depth == _LATE_ROOTS_DEPTH:
            levels.enter_roots(late_roots)
    return SearchResult(levels.tree(), levels.walk)


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
        on_progress: Callable[[], None],
    ) -> None:
        self._on_progress = on_progress
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
        self._holders: dict[int, Any] = {}
        """By key, the object that has it."""
        self._holders_at: defaultdict[int, list[Any]] = defaultdict(list)
        """By distance, the objects there that have a key."""

    @property
    def has_all(self) -> bool:
        """Whether all wanted keys were found."""
        return len(self._holders) == len(self._wanted)

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
        for start in range(first, end, _OBJECTS_AT_ONCE):
            self._apply_rules(self.walk.follow(start, min(start + _OBJECTS_AT_ONCE, end)))
            self._on_progress()

    def _enter(self, values: list[Any]) -> None:
        for start in range(0, len(values), _OBJECTS_AT_ONCE):
            self._apply_rules(self.walk.enter(values[start : start + _OBJECTS_AT_ONCE]))

    def _apply_rules(self, values: Iterable[Any]) -> None:
        """Look for keys in new objects of the last level, and for references gc does not see."""
        # Local names, because this runs for each object of a type with rules.
        wanted, holders, rules_of = self._wanted, self._holders, self._rules
        for value in values:
            rules = rules_of[type(value)]
            if rules is None:
                self.walk.add_plain(type(value))
                continue
            for key in rules.keys(value):
                if key in wanted and key not in holders:
                    holders[key] = value
                    self._holders_at[len(self._starts) - 1].append(value)
            for text, child in rules.extra_references(value):
                self._pending.append(Reference(child, value, None, text))

    def tree(self) -> ReferenceTree:
        """Return the references that lead to all holders found so far.

        The levels are gone through backwards, from the farthest holder to the roots, with only the
        objects that are on a path.
        """
        references, self._references = self._references, {}
        parents: dict[int, Any] = {}
        is_complete = True
        for distance in reversed(range(len(self._starts))):
            needed = [*self._holders_at.pop(distance, ()), *parents.values()]
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
        holders = self._holders if is_complete else without_broken(references, self._holders)
        return ReferenceTree(references, holders)

    def _references_from_roots(self, distance: int, wanted: Iterable[Any]) -> dict[int, Reference]:
        """Return the first reference from a root to each of `wanted` that was added as its value.

        Most values of roots lead to nothing that is looked for, so this is done afterwards.
        """
        roots, first = self._entered[distance]
        end = [*self._starts, len(self.walk)][distance + 1]
        unknown = {*map(id, wanted)} & {*map(id, self.walk[first:end])}
        references: dict[int, Reference] = {}
        for root in roots if unknown else ():
            for name, value in root.names.items():
                if id(value) in unknown:
                    references.setdefault(id(value), Reference(value, None, root, name))
        return references
