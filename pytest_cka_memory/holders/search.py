"""Who refers to an object: one forward search from everything a program can name.

Forward, because one pass finds every target at once; a backward search costs as much again for
each. Objects are known by their type: to ask one for an attribute may compute, warn or raise.
"""

import gc
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_cka_memory.holders.roots import Root, globals_of, modules

_LEAVES = frozenset(
    {str, bytes, bytearray, int, float, complex, bool, type(None), type(...), range}
    | {types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType}
    | {types.GetSetDescriptorType, types.MemberDescriptorType}
)
_LATE_DEPTH = 3
_AT_ONCE = 10_000


@dataclass(frozen=True)
class Step:
    """An object on a path, and what led to it: an object, or the root and the name in it."""

    value: Any
    parent: Any
    root: Root | None = None
    edge: str | None = None
    """How to write the step, where that is known: a name in the root, or ``.grad_fn``."""


@dataclass(frozen=True)
class Look:
    """What to make of the objects of one type."""

    keys: Callable[[Any], Collection[int]] = lambda _: ()
    """Which of the wanted an object is, or holds by itself."""
    beyond: Callable[[Any], Iterable[tuple[str, Any]]] = lambda _: ()
    """References that the garbage collector cannot see or name, each with how it is written."""


LookAt = Callable[[type], Look | None]
"""What to make of a type; None where the garbage collector knows all."""


def search(
    look_at: LookAt,
    wanted: Collection[int],
    roots: Collection[Root],
    late_roots: Collection[Root],
) -> dict[int, list[Step]]:
    """Find a short path to each wanted thing.

    Args:
        look_at: tells what is wanted, and more references than the garbage collector does.
        wanted: what to find, by key.
        roots: where to start. Modules and their globals are entered only as roots, so that no
            path leads through an import.
        late_roots: names nobody would type first: entered after a few steps from the others.

    Returns:
        For each key that was found, the steps from a root to the object.
    """
    known = list(modules().values())
    levels = _Levels(look_at, wanted, barred=[*known, *map(globals_of, known)])
    levels.enter_roots(roots)
    depth = 0
    while levels.missing and (levels.present or depth < _LATE_DEPTH):
        levels.advance()
        depth += 1
        if depth == _LATE_DEPTH:
            levels.enter_roots(late_roots)
    return levels.ways()


class _Levels:
    """All objects, by their distance from the roots.

    How each was reached is not noted, for that costs more than all the rest: it is found again,
    backwards, for the few that matter.
    """

    def __init__(self, look_at: LookAt, wanted: Collection[int], barred: Iterable[Any]) -> None:
        self.missing = set(wanted)
        self._look_at = look_at
        self._looks: dict[type, Look | None] = {}
        self._levels: list[list[Any]] = [[]]
        # Alive as long as this, or their ids would be given to others.
        self._seen = {id(value): value for value in barred}
        self._steps: dict[int, Step] = {}
        """Those that no other object can tell: from roots, and beyond what gc sees."""
        self._beyond: list[Step] = []
        self._found: dict[int, Any] = {}
        self._found_at: defaultdict[int, set[int]] = defaultdict(set)

    @property
    def present(self) -> list[Any]:
        """The objects at the largest distance so far."""
        return self._levels[-1]

    def enter_roots(self, roots: Iterable[Root]) -> None:
        """Enter the values of `roots` into the present level."""
        for root in roots:
            new = self._enter(list(root.names.values()))
            for name, value in root.names.items():
                if id(value) in new:
                    self._steps.setdefault(id(value), Step(value, None, root, name))

    def advance(self) -> None:
        """Enter all that the present level refers to, as the next one."""
        level = self.present
        self._levels.append([])
        beyond, self._beyond = self._beyond, []
        for step in beyond:
            if self._enter((step.value,)):
                self._steps[id(step.value)] = step
        for start in range(0, len(level), _AT_ONCE):
            self._enter(gc.get_referents(*level[start : start + _AT_ONCE]))

    def _enter(self, values: Iterable[Any]) -> Mapping[int, Any]:
        seen = self._seen
        new = {id(it): it for it in values if type(it) not in _LEAVES and id(it) not in seen}
        seen.update(new)
        self.present.extend(new.values())
        looks = self._looks
        for value in new.values():
            kind = type(value)
            if kind not in looks:
                looks[kind] = self._look_at(kind)
            look = looks[kind]
            if look is not None:
                self._examine(value, look)
        return new

    def _examine(self, value: Any, look: Look) -> None:
        for key in look.keys(value):
            if key in self.missing:
                self.missing.discard(key)
                self._found[key] = value
                self._found_at[len(self._levels) - 1].add(id(value))
        self._beyond += [Step(child, value, None, edge) for edge, child in look.beyond(value)]

    def ways(self) -> dict[int, list[Step]]:
        """The steps to everything found so far."""
        steps = dict(self._steps)
        needed: set[int] = set()
        for distance in reversed(range(len(self._levels))):
            needed |= self._found_at[distance]
            unknown = {ident for ident in needed if ident not in steps}
            if unknown:
                steps.update(self._steps_between(self._levels[distance - 1], unknown))
            # Another thread may have taken something away meanwhile: that step is missing then.
            parents = (steps[ident].parent for ident in needed if ident in steps)
            needed = {id(parent) for parent in parents if parent is not None}
        ways = {key: _way_to(value, steps) for key, value in self._found.items()}
        return {key: way for key, way in ways.items() if way}

    def _steps_between(self, parents: Sequence[Any], unknown: set[int]) -> dict[int, Step]:
        steps: dict[int, Step] = {}
        for parent in parents:
            for ident in unknown.intersection(map(id, gc.get_referents(parent))):
                steps[ident] = Step(self._seen[ident], parent)
                unknown.discard(ident)
            if not unknown:
                break
        return steps


def _way_to(value: Any, steps: dict[int, Step]) -> list[Step]:
    way: list[Step] = []
    while value is not None:
        step = steps.get(id(value))
        if step is None:
            return []
        way.append(step)
        value = step.parent
    return way[::-1]
