"""Find what holds the objects that no name in a program leads to.

After a garbage collection such objects are alive for one of two reasons: C or C++ code holds one of
them, or they hold each other by references of C++ that the collector does not see, as an autograd
graph does. The search begins at all objects of the collector that the search from the names has not
met, and follows the references that :mod:`.references` knows, too.
"""

import types
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.core.places import OWN_FOLDERS
from pytest_cka_memory.holders import Reference, ReferenceTree
from pytest_cka_memory.holders.search import LEAVES, ByType, RulesForType, Walk
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.objects import grad_fn_of, is_node

_MOST_OBJECTS = 400_000
"""Objects after which the walk stops, so that its time is bounded."""
_MOST_STARTS = 8
"""Nodes through which the shortest loop is searched for."""


class Unreached(NamedTuple):
    """How an object that no name leads to is kept alive."""

    path: list[Reference]
    """From an object that C code holds, or that is part of a loop, to the holder."""
    loop: list[Reference]
    """From an object back to itself, through the first of `path`; empty if C code holds that."""


class UnreachedTree(ReferenceTree):
    """The references that lead to objects which no name leads to.

    Args:
        loops: by the identity of each object of a loop, the loop.
    """

    def __init__(
        self,
        references: Mapping[int, Reference] | None = None,
        holders: Mapping[int, Any] | None = None,
        loops: Mapping[int, list[Reference]] | None = None,
    ) -> None:
        super().__init__(references, holders)
        self._loops = {} if loops is None else loops

    def start(self, first: Reference) -> object:
        return type(first.value), frozenset(
            type(reference.value) for reference in self.loop_of(first)
        )

    def loop_of(self, first: Reference) -> list[Reference]:
        """Return the loop in which a path begins; empty if C code holds the object there."""
        return self._loops.get(id(first.value), [])

    def unreached(self, key: int) -> Unreached:
        """Return how the object that has `key` is kept alive."""
        path = self.path(key)
        return Unreached(path, self.loop_of(path[0]))


def find_unreached(
    rules_for: RulesForType, wanted: Collection[int], reached: Walk
) -> UnreachedTree:
    """Return how the objects that have the wanted keys are kept alive.

    Args:
        rules_for: as for :func:`.search.search`.
        wanted: the keys that no name leads to.
        reached: the objects that names lead to.

    Returns:
        The paths to the keys that objects have; a key that only C++ code has is missing.
    """
    tracked = [it for it in reached.unmet() if not _is_own(it)]
    graph = _Graph(rules_for, wanted, reached)  # after that, so that it is not a part of itself
    graph.walk(tracked)
    if not graph.holders:
        return UnreachedTree()
    ancestors = graph.ancestors()
    loops = [_shortest_loop(graph, members) for members in _loops(graph, ancestors)]
    by_start = {id(reference.value): loop for loop in loops for reference in loop}
    parents = _paths_from(graph, ancestors, by_start)
    references = {it: _reference(graph, it, *parent) for it, parent in parents.items()}
    for holder in graph.holders.values():
        # Objects in a loop that only Python's references close are held by C code, too.
        references.setdefault(holder, _reference(graph, holder, None, None))
    holders = {key: graph.objects[holder] for key, holder in graph.holders.items()}
    return UnreachedTree(references, holders, by_start)


class _Graph:
    """The references between objects that no name leads to, and objects that only these lead to."""

    def __init__(self, rules_for: RulesForType, wanted: Collection[int], reached: Walk) -> None:
        self.objects: dict[int, Any] = {}
        self.references: dict[int, dict[int, str | None]] = {}
        """Of each object: those it references, with the text of references of C++."""
        self.referrers: defaultdict[int, list[int]] = defaultdict(list)
        self.holders: dict[int, int] = {}
        """By key, the object that has it."""
        self._rules = ByType(rules_for)
        self._wanted, self._reached = wanted, reached
        self._tracked: set[int] = set()

    def walk(self, tracked: Iterable[Any]) -> None:
        """Add `tracked` and everything that only they lead to."""
        self.objects = {id(it): it for it in tracked}
        self._tracked = set(self.objects)
        queue = deque(self.objects.values())
        while queue and len(self.objects) < _MOST_OBJECTS:
            self._enter(queue.popleft(), queue)

    def ancestors(self) -> set[int]:
        """Return the holders and everything that leads to one."""
        ancestors = set(self.holders.values())
        queue = deque(ancestors)
        while queue:
            for referrer in self.referrers[queue.popleft()]:
                if referrer not in ancestors:
                    ancestors.add(referrer)
                    queue.append(referrer)
        return ancestors

    def _is_new(self, value: Any) -> bool:
        return type(value) not in LEAVES and value not in self._reached

    def _enter(self, value: Any, queue: deque[Any]) -> None:
        ident, rules = id(value), self._rules[type(value)]
        children: list[tuple[str | None, Any]] = []
        if rules is not None:
            for key in rules.keys(value):
                if key in self._wanted:
                    self._add_holder(key, ident)
            if ident in self._tracked or not is_temporary(value):
                children += rules.extra_references(value)
                children += self._packed(value, children)
        new = [(text, child) for text, child in children if self._is_new(child)]
        references: dict[int, str | None] = {}
        for text, child in chain(new, zip(repeat(None), self._reached.unmet_referents(value))):
            # A variable of the search, in a cell, may lead to the graph itself.
            if child is not self and child is not self._reached:
                references.setdefault(id(child), text)
                if id(child) not in self.objects:
                    self.objects[id(child)] = child
                    queue.append(child)
        self.references[ident] = references
        for child_id in references:
            self.referrers[child_id].append(ident)

    def _packed(self, node: Any, saved: Sequence[tuple[str | None, Any]]) -> list[tuple[str, Any]]:
        """Return results of `node` that a hook of saved_tensors_hooks has given it, for torch 2.9.

        There only a copy can be read, with the same storage. Without a hook, a node saves the data
        of its result and does not keep the result itself alive.
        """
        if torch_private.SHOWS_SAVED or not is_node(type(node)):
            return []
        results = []
        for text, copy in saved:
            if text is not None and text.startswith("._saved_") and is_temporary(copy):
                rules = self._rules[type(copy)]
                keys = () if rules is None else rules.keys(copy)
                holders = (self.objects.get(self.holders.get(key, 0)) for key in keys)
                results += [
                    (text, it) for it in holders if it is not None and grad_fn_of(it) is node
                ]
        return results

    def _add_holder(self, key: int, ident: int) -> None:
        """Prefer an object that existed before the search to one that reading has made.

        Of those, prefer a tensor to its storage: torch keeps the object of a storage once it was
        read, which says nothing about what holds the tensor.
        """
        known = self.holders.setdefault(key, ident)
        if self._rank(known) < self._rank(ident):
            self.holders[key] = ident

    def _rank(self, ident: int) -> tuple[bool, bool]:

        is_storage = issubclass(type(self.objects[ident]), torch.UntypedStorage)
        return ident in self._tracked, not is_storage


def _is_own(value: Any) -> bool:
    """Whether `value` belongs to this search: a frame of the plugin."""
    return type(value) is types.FrameType and value.f_code.co_filename.startswith(OWN_FOLDERS)


def is_temporary(value: Any) -> bool:
    """Whether `value` is a tensor that only Python holds: reading a saved tensor may make one.

    Autograd makes a new tensor for a saved result and gives it the ``grad_fn`` of the original.
    That looks like a loop, but what is saved does not reference its node.
    """
    return issubclass(type(value), torch.Tensor) and torch_private.use_count(value) == 1


def _loops(graph: _Graph, inside: set[int]) -> Iterator[list[int]]:
    """Yield the members of each loop through C++, and of loops that share members with it."""
    for members in _components(graph, inside):
        is_loop = len(members) > 1 or members[0] in graph.references.get(members[0], ())
        if is_loop and any(_is_of_autograd(graph.objects[member]) for member in members):
            yield members


def _is_of_autograd(value: Any) -> bool:
    """Whether the references of an object are in C++, so that the collector does not see all."""
    return issubclass(type(value), torch.Tensor) or is_node(type(value))


def _components(graph: _Graph, inside: set[int]) -> Iterator[list[int]]:
    """Yield the strongly connected components, by Tarjan's algorithm without recursion.

    Source: R. Tarjan, "Depth-first search and linear graph algorithms", SIAM J. Comput. 1 (1972).
    """
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for start in inside:
        if start in number:
            continue
        work = [(start, iter(graph.references.get(start, ())))]
        number[start] = lowest[start] = len(number)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, children = work[-1]
            for child in children:
                if child not in inside:
                    continue
                if child not in number:
                    number[child] = lowest[child] = len(number)
                    stack.append(child)
                    on_stack.add(child)
                    work.append((child, iter(graph.references.get(child, ()))))
                    break
                if child in on_stack:
                    lowest[node] = min(lowest[node], number[child])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[node])
                if lowest[node] == number[node]:
                    component: list[int] = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                    yield component


def _paths_from(
    graph: _Graph, inside: set[int], starts: Iterable[int]
) -> dict[int, tuple[int | None, str | None]]:
    """Return for each object its referrer on a shortest path, and the text of the reference.

    Paths begin at members of loops and at objects that no other of these objects references.
    """
    first = [*starts, *(it for it in inside if not any(graph.referrers[it]))]
    steps: dict[int, tuple[int | None, str | None]] = dict.fromkeys(first, (None, None))
    queue = deque(first)
    while queue:
        current = queue.popleft()
        for child, text in graph.references.get(current, {}).items():
            if child in inside and child not in steps:
                steps[child] = current, text
                queue.append(child)
    return steps


def _reference(graph: _Graph, identity: int, parent: int | None, text: str | None) -> Reference:
    value = graph.objects[identity]
    return Reference(value, None if parent is None else graph.objects[parent], None, text)


def _shortest_loop(graph: _Graph, members: Sequence[int]) -> list[Reference]:
    """Return a short loop among `members`, through an autograd node if there is one.

    The collector cannot free what a node references, but other loops of Python's objects.
    """
    inside = frozenset(members)
    nodes = [member for member in members if is_node(type(graph.objects[member]))]
    tensors = [member for member in members if _is_of_autograd(graph.objects[member])]
    starts = (nodes or tensors)[:_MOST_STARTS]
    return min((_loop_through(graph, start, inside) for start in starts), key=len)


def _loop_through(graph: _Graph, start: int, inside: Collection[int]) -> list[Reference]:
    steps: dict[int, tuple[int, str | None]] = {}
    queue = deque([start])
    while start not in steps:
        current = queue.popleft()
        for child, text in graph.references.get(current, {}).items():
            if child in inside and child not in steps:
                steps[child] = current, text
                queue.append(child)
    loop: list[Reference] = []
    current = start
    while not loop or current != start:
        parent, text = steps[current]
        loop.append(Reference(graph.objects[current], graph.objects[parent], None, text))
        current = parent
    return [Reference(graph.objects[start], None), *loop[::-1]]
