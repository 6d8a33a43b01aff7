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
from typing import Any, NamedTuple

from pytest_cka_memory.holders.roots import Root, globals_of, modules

LEAVES = frozenset(
    {str, bytes, bytearray, int, float, complex, bool, type(None), type(...), range}
    | {types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType}
    | {types.GetSetDescriptorType, types.MemberDescriptorType}
)
"""Types whose objects reference nothing of interest."""
_LATE_ROOTS_DEPTH = 3
_REFERENTS_PER_CALL = 10_000


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
    """All objects that were met, by identity; everything that names lead to if a key is missing."""


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
        self._rules_for = rules_for
        self._rules: dict[type, TypeRules | None] = {}
        self._levels: list[list[Any]] = [[]]
        # Holds the objects, because the id of a freed object may be used again.
        self._seen = {id(value): value for value in excluded}
        self._references: dict[int, Reference] = {}
        """By the id of the object; those from roots and the extra ones, which gc does not see."""
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

    def enter_roots(self, roots: Iterable[Root]) -> None:
        """Add the values of `roots` to the last level."""
        for root in roots:
            new = self._enter(list(root.names.values()))
            for name, value in root.names.items():
                if id(value) in new:
                    self._references.setdefault(id(value), Reference(value, None, root, name))

    def advance(self) -> None:
        """Add a level with everything that the last level references."""
        level = self.last
        self._levels.append([])
        pending, self._pending = self._pending, []
        for reference in pending:
            if self._enter((reference.value,)):
                self._references[id(reference.value)] = reference
        for start in range(0, len(level), _REFERENTS_PER_CALL):
            self._enter(gc.get_referents(*level[start : start + _REFERENTS_PER_CALL]))

    def _enter(self, values: Iterable[Any]) -> Mapping[int, Any]:
        """Add those of `values` that are new to the last level, and return them by id."""
        seen = self._seen
        new = {id(it): it for it in values if type(it) not in LEAVES and id(it) not in seen}
        seen.update(new)
        self.last.extend(new.values())
        kinds = set(map(type, new.values()))
        for kind in kinds.difference(self._rules):
            self._rules[kind] = self._rules_for(kind)
        ruled = {kind: rules for kind in kinds if (rules := self._rules[kind]) is not None}
        if ruled:
            for value in new.values():
                if (rules := ruled.get(type(value))) is not None:
                    self._apply(rules, value)
        return new

    def _apply(self, rules: TypeRules, value: Any) -> None:
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
            unknown = {ident for ident in needed if ident not in references}
            if unknown:
                references.update(self._references_from(self._levels[distance - 1], unknown))
            # If another thread has removed a reference meanwhile, it is missing here.
            parents = (references[ident].parent for ident in needed if ident in references)
            needed = {id(parent) for parent in parents if parent is not None}
        paths = {key: _path_to(value, references) for key, value in self._found.items()}
        return {key: path for key, path in paths.items() if path}

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
