"""The references that lead from names to all objects that a search has found.

They form a tree: each object has the one reference by which it was met. So a path takes no memory
of its own, and what a million paths have in common is looked at once.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pytest_cka_memory.holders.roots import Root


@dataclass(slots=True, eq=False)
class Reference:
    """A reference to an object, from another object or from a name in a root."""

    value: Any
    """The object that is referenced."""
    parent: Any
    """The object that references it; None if a root does."""
    root: Root | None = None
    text: str | None = None
    """How to write the reference, if known: a name in the root, or for example ``.grad_fn``."""


class ReferenceTree:
    """A path to each object that has a key which was looked for.

    Args:
        references: by the identity of an object, the reference by which it was met.
        holders: by key, the object that has it.
    """

    def __init__(
        self,
        references: Mapping[int, Reference] | None = None,
        holders: Mapping[int, Any] | None = None,
    ) -> None:
        self._holders = {} if holders is None else holders
        self._references = {} if references is None else references

    def __contains__(self, key: int) -> bool:
        return key in self._holders

    @property
    def keys(self) -> Set[int]:
        """The keys that objects have."""
        return self._holders.keys()

    @property
    def holders(self) -> Collection[Any]:
        """The objects that have a key, one for each key."""
        return self._holders.values()

    @property
    def references(self) -> Collection[Reference]:
        """All references of the tree."""
        return self._references.values()

    def find(self, key: int) -> Reference | None:
        """Return the reference to the object that has `key`; None if there is none."""
        holder = self._holders.get(key)
        return None if holder is None else self._references[id(holder)]

    def last(self, key: int) -> Reference:
        """Return the reference to the object that has `key`."""
        return self._references[id(self._holders[key])]

    def start(self, first: Reference) -> object:
        """Return what is equal for paths that begin in the same way as the one with `first`."""
        assert first.root is not None, "a path starts at a root"
        return first.root.prefix, first.root.suffix, first.text

    def before(self, reference: Reference) -> Reference | None:
        """Return the reference to the parent of `reference`; None for the first of a path."""
        return None if reference.parent is None else self._references[id(reference.parent)]

    def upwards(self, reference: Reference) -> Iterator[Reference]:
        """Yield `reference`, the one before it, and so on to the first of the path."""
        step: Reference | None = reference
        while step is not None:
            yield step
            step = self.before(step)

    def path(self, key: int) -> list[Reference]:
        """Return the references that lead to the object that has `key`, the first of them first."""
        return self.path_to(self.last(key))

    def path_to(self, last: Reference) -> list[Reference]:
        """Return the references of the path that ends with `last`, the first of them first."""
        return [*self.upwards(last)][::-1]


def without_broken(references: dict[int, Reference], holders: Mapping[int, Any]) -> dict[int, Any]:
    """Return those `holders` to which `references` lead from a root."""
    leading: dict[int, bool] = {}
    for holder in holders.values():
        climbed, value = [], holder
        while value is not None and id(value) not in leading:
            climbed.append(id(value))
            reference = references.get(id(value))
            if reference is None:
                leading[id(value)] = False
                break
            value = reference.parent
        leads = value is None or leading[id(value)]
        leading.update(dict.fromkeys(climbed, leads))
    return {key: holder for key, holder in holders.items() if leading[id(holder)]}


class _Place(NamedTuple):
    """Where the path to an object leaves the first path of its group."""

    shared: int
    """How many references both begin with."""
    branch: int
    """Identity of the first object after these."""
    length: int
    """How many references lead to the object."""

    def then(self, identity: int) -> "_Place":
        """Return the place of an object to which this one leads."""
        return _Place(self.shared, self.branch or identity, self.length + 1)


class _Common(NamedTuple):
    """What the paths of a group have in common, as the properties of :class:`Paths` say."""

    shared: int
    branches: int
    longest: int


class Paths:
    """The paths to the holders of a group of storages, that of the largest first.

    Args:
        tree: has the references that lead to them.
        ends: the last reference of each path.
    """

    def __init__(self, tree: ReferenceTree, ends: Sequence[Reference]) -> None:
        self.tree, self.ends = tree, ends

    @cached_property
    def first(self) -> list[Reference]:
        """The path to the holder of the largest storage."""
        return self.tree.path_to(self.ends[0])

    @property
    def shared(self) -> list[Reference]:
        """The references with which all paths begin; never the whole of one."""
        return self.first[: self._common.shared]

    @property
    def branches(self) -> int:
        """How many objects follow after the shared references."""
        return self._common.branches

    @property
    def longest(self) -> int:
        """The references of the longest path."""
        return self._common.longest

    def objects_of(self, kind: type) -> int:
        """Return how many objects of a class are on the paths."""
        return sum(issubclass(type(step.value), kind) for step in self._steps())

    def all_lead_through(self, head: Any, is_kind: Callable[[type], bool]) -> bool:
        """Whether between `head` and the end of each path there are objects of some types only.

        A path that ends at `head` does, too.

        Args:
            head: an object.
            is_kind: whether a type is one of these.
        """
        leading = {id(head)}
        for last in self.ends:
            if id(last.value) in leading:
                continue
            climbed = []
            step = self.tree.before(last)
            while step is not None and id(step.value) not in leading:
                if not is_kind(type(step.value)):
                    return False
                climbed.append(id(step.value))
                step = self.tree.before(step)
            if step is None:
                return False
            leading.update(climbed)
        return True

    @cached_property
    def _common(self) -> "_Common":
        on_first = {id(step.value): number for number, step in enumerate(self.first)}
        known: dict[int, _Place] = {}
        count, longest = len(self.first) - 1, len(self.first)
        branches = {id(self.first[-1].value)}
        for last in self.ends:
            identity = id(last.value)
            number = on_first.get(identity)
            if number is None:
                before = known.get(id(last.parent)) or self._place_before(last, on_first, known)
                shared, branch = before.shared, before.branch or identity
                longest = max(longest, before.length + 1)
            else:  # it ends on the first path
                shared, branch = number, identity
            if shared < count:
                count = shared
                branches = {id(self.first[count].value)}
            if shared == count:
                branches.add(branch)
        return _Common(count, len(branches), longest)

    def _place_before(
        self, last: Reference, on_first: Mapping[int, int], known: dict[int, _Place]
    ) -> _Place:
        """Return the place of the parent of `last`, and note it in `known`."""
        inner = []
        place = _Place(0, 0, 0)
        step = self.tree.before(last)
        while step is not None:
            identity = id(step.value)
            if identity in known:
                place = known[identity]
                break
            if identity in on_first:
                place = _Place(on_first[identity] + 1, 0, on_first[identity] + 1)
                break
            inner.append(identity)
            step = self.tree.before(step)
        for identity in reversed(inner):
            place = known[identity] = place.then(identity)
        if last.parent is not None:
            known[id(last.parent)] = place
        return place

    def _steps(self) -> Iterable[Reference]:
        known: set[int] = set()
        for last in self.ends:
            for step in self.tree.upwards(last):
                if id(step.value) in known:
                    break
                known.add(id(step.value))
                yield step
