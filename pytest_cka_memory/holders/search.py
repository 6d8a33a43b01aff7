"""Find what references an object: a forward search from everything that a program can name.

The search goes forward because one pass finds all objects that are looked for; a backward search
costs about as much for each of them. Objects are distinguished by their type only, because reading
an attribute of an unknown object may run code, print a warning or raise.
"""

import gc
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, filterfalse
from typing import Any, NamedTuple

from pytest_cka_memory.holders.by_type import ByType
from pytest_cka_memory.holders.roots import Root, globals_of, modules

LEAVES = frozenset(
    {str, bytes, bytearray, int, float, complex, bool, type(None), type(...), range}
    | {types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType}
    | {types.GetSetDescriptorType, types.MemberDescriptorType}
)
"""Types whose objects reference nothing of interest."""
_LATE_ROOTS_DEPTH = 3
_AT_ONCE = 10_000
"""Objects that are looked at together: few enough for the caches of a processor."""


@dataclass(frozen=True)
class Reference:
    """A reference to an object, from another object or from a name in a root."""

    value: Any
    """The object that is referenced."""
    parent: Any
    """The object that references it; None if a root does."""
    root: Root | None = None
    text: str | None = None
    """How to write the reference, if known: a name in the root, or for example ``.grad_fn``."""


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

    paths: dict[int, list[Reference]]
    """For each key that was found, the references from a root to the object that has it."""
    reached: Mapping[int, Any]
    """All objects that were met, by identity; everything that names lead to if a key is missing.

    What leads nowhere and is not tracked by the collector may be left out.
    """


def search(
    rules_for: RulesForType,
    wanted: Collection[int],
    roots: Collection[Root],
    late_roots: Collection[Root],
    avoided: Iterable[Any] = (),
) -> Found:
    """Find a short path to each wanted key.

    Args:
        rules_for: returns which keys the objects of a type have, and their extra references.
        wanted: the keys to find.
        roots: where to start. Modules and their globals are entered only as roots, so that no
            path leads through an import.
        late_roots: names that users rarely type; they are entered a few levels later.
        avoided: objects through which no path leads.
    """
    imported = list(modules().values())
    levels = _Levels(rules_for, wanted, excluded=[*avoided, *imported, *map(globals_of, imported)])
    levels.enter_roots(roots)
    depth = 0
    while levels.missing and (levels.last or depth < _LATE_ROOTS_DEPTH):
        levels.advance()
        depth += 1
        if depth == _LATE_ROOTS_DEPTH:
            levels.enter_roots(late_roots)
    return Found(levels.paths(), levels.reached)


class _Levels:
    """All objects reached so far, by their distance from the roots.

    Which object led to which is not recorded, because that would cost more than the rest of the
    search: `paths` finds it again, backwards, for the few objects that matter.
    """

    def __init__(
        self, rules_for: RulesForType, wanted: Collection[int], excluded: Iterable[Any]
    ) -> None:
        self.missing = set(wanted)
        rules = ByType(rules_for)
        self._rules = rules
        # Not a method, which would make a cycle: the levels must be freed after the search.
        self._has_rules = ByType(lambda kind: rules[kind] is not None)
        self._may_refer = ByType(lambda kind: kind not in LEAVES)
        self._levels: list[list[Any]] = [[]]
        self._entered: dict[int, tuple[Collection[Root], int]] = {}
        """By distance, roots whose values were added there, and how many objects came before."""
        # Holds the objects, because the id of a freed object may be used again.
        self._seen = {id(value): value for value in excluded}
        self._references: dict[int, Reference] = {}
        """By the id of the object; only the extra ones, which gc does not see."""
        self._pending: list[Reference] = []
        """Extra references from the last level."""
        self._found: dict[int, Any] = {}
        self._found_at: defaultdict[int, set[int]] = defaultdict(set)

    @property
    def reached(self) -> Mapping[int, Any]:
        """All objects so far, by identity."""
        return self._seen

    @property
    def last(self) -> list[Any]:
        """The objects at the largest distance so far."""
        return self._levels[-1]

    def enter_roots(self, roots: Collection[Root]) -> None:
        """Add the values of `roots` to the last level."""
        self._entered[len(self._levels) - 1] = roots, len(self.last)
        self._enter([*chain.from_iterable(root.names.values() for root in roots)])

    def advance(self) -> None:
        """Add a level with everything that the last level references."""
        level = self.last
        self._levels.append([])
        pending, self._pending = self._pending, []
        for reference in pending:
            if self._enter([reference.value]):
                self._references[id(reference.value)] = reference
        for start in range(0, len(level), _AT_ONCE):
            self._enter(gc.get_referents(*level[start : start + _AT_ONCE]))

    def _enter(self, values: Sequence[Any]) -> int:
        """Add those of `values` that are new to the last level, and return how many."""
        parts = (values[first : first + _AT_ONCE] for first in range(0, len(values), _AT_ONCE))
        return sum(self._enter_part(part) for part in parts)

    def _enter_part(self, values: Sequence[Any]) -> int:
        """Do the same without a step in Python for each value, unless its type has rules."""
        seen = self._seen
        kept = [*compress(values, map(self._may_refer.__getitem__, map(type, values)))]
        kept = self._without_plain_data(kept)
        new = dict(zip(map(id, kept), kept, strict=True))
        for ident in new.keys() & seen.keys():
            del new[ident]
        seen.update(new)
        self.last.extend(new.values())
        has_rules = map(self._has_rules.__getitem__, map(type, new.values()))
        for value in compress(new.values(), has_rules):
            self._apply(self._rules[type(value)], value)
        return len(new)

    def _without_plain_data(self, values: list[Any]) -> list[Any]:
        """Return `values`, without those that the collector does not track if these lead nowhere.

        It does not track dicts and tuples of numbers and strings, of which there may be very many.
        To look into those of one part together takes less time than to remember each.
        """
        untracked = [*filterfalse(gc.is_tracked, values)]
        if 2 * len(untracked) < len(values):
            return values
        types = set(map(type, untracked))
        children = set(map(type, gc.get_referents(*untracked)))
        if any(map(self._has_rules.__getitem__, types)) or not LEAVES.issuperset(children):
            return values
        return [*filter(gc.is_tracked, values)]

    def _apply(self, rules: TypeRules | None, value: Any) -> None:
        assert rules is not None
        for key in rules.keys(value):
            if key in self.missing:
                self.missing.discard(key)
                self._found[key] = value
                self._found_at[len(self._levels) - 1].add(id(value))
        self._pending += [
            Reference(child, value, None, text) for text, child in rules.extra_references(value)
        ]

    def paths(self) -> dict[int, list[Reference]]:
        """Return the references that lead to everything found so far."""
        references = dict(self._references)
        needed: set[int] = set()
        for distance in reversed(range(len(self._levels))):
            needed |= self._found_at[distance]
            unknown = needed - references.keys()
            references.update(self._references_from_roots(distance, unknown))
            unknown -= references.keys()
            if unknown:
                references.update(self._references_from(self._levels[distance - 1], unknown))
            # If another thread has removed a reference meanwhile, it is missing here.
            parents = (references[ident].parent for ident in needed if ident in references)
            needed = {id(parent) for parent in parents if parent is not None}
        paths = {key: _path_to(value, references) for key, value in self._found.items()}
        return {key: path for key, path in paths.items() if path}

    def _references_from_roots(self, distance: int, wanted: set[int]) -> dict[int, Reference]:
        """Return the first reference from a root to each of `wanted` that was added as its value.

        Most values of roots lead to nothing that is looked for, so this is done afterwards.
        """
        roots, first = self._entered.get(distance, ((), 0))
        unknown = wanted.intersection(map(id, self._levels[distance][first:])) if roots else set()
        found: dict[int, Reference] = {}
        for root in roots if unknown else ():
            for name, value in root.names.items():
                if id(value) in unknown:
                    found.setdefault(id(value), Reference(value, None, root, name))
        return found

    def _references_from(self, parents: Sequence[Any], unknown: set[int]) -> dict[int, Reference]:
        """Return a reference from one of `parents` to each of `unknown`."""
        found: dict[int, Reference] = {}
        for parent in parents:
            for ident in unknown.intersection(map(id, gc.get_referents(parent))):
                found[ident] = Reference(self._seen[ident], parent)
                unknown.discard(ident)
            if not unknown:
                break
        return found


def _path_to(value: Any, references: dict[int, Reference]) -> list[Reference]:
    path: list[Reference] = []
    while value is not None:
        reference = references.get(id(value))
        if reference is None:
            return []
        path.append(reference)
        value = reference.parent
    return path[::-1]
