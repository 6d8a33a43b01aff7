"""Describe the reference cycles in garbage: what they keep alive, and each cycle as code."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from gc import get_referents
from types import CellType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, NamedTuple

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.core.places import shown
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.holders import locals_of
from pytest_cka_memory.holders.expressions import shortened, text_of
from pytest_cka_memory.holders.groups import Entry, grouped, holding_of, site_key
from pytest_cka_memory.holders.references import tensor_rules
from pytest_cka_memory.holders.search import TypeRules
from pytest_cka_memory.holders.tensors import class_name, dtype_and_shape_of
from pytest_cka_memory.meters import torch_private

_MOST_SEARCHED = 20_000
"""Objects that one search for a cycle visits; a longer cycle would not be readable either."""
_PLAIN = (dict, list, tuple, set, frozenset, deque, CellType, FunctionType, MethodType)
_UNNAMED = frozenset((*_PLAIN, FrameType, TracebackType))
"""Types whose objects are a part of a path, not a station that has a name."""

_EXCEPTION = (
    "delete the variable that holds the exception, or clear its traceback with "
    "error.with_traceback(None); the traceback keeps frames alive, and one of them "
    "references the exception"
)
_METHOD = (
    "keep weakref.WeakMethod(self.method) instead of the bound method, or look the method "
    "up when it is called; the object references itself through its bound method"
)
_CLOSURE = (
    "pass the object to the function as an argument, or reference the object with weakref.ref; "
    "the closure of the function references the object, and the object references the function"
)
_OBJECTS = (
    "make one of these references weak with weakref.ref, or delete it when it is not needed "
    "any more"
)

_NOT_DESCRIBED = (
    "to see the cycle, call gc.disable() before the region; the collector, or a generator "
    "or finalizer in the cycle, freed it before it could be described"
)

DescribedGarbage = list[tuple[Allocation, Holding]]
"""Storages that garbage keeps alive, each with its description."""


class _Path(NamedTuple):
    """How garbage leads to an object, also by references that the collector does not see."""

    garbage: Any
    text: str
    """What follows the expression of the garbage object: ``.grad_fn``; empty if it is the value."""
    value: Any


def described_garbage(
    garbage: Sequence[Any], allocations: Iterable[Allocation]
) -> DescribedGarbage:
    """Return those of `allocations` that garbage references, with the cycles that hold them.

    Some of them may be referenced by live objects too; :func:`freed_holdings` leaves these out.

    Args:
        garbage: what the collector has found, before it is freed.
        allocations: live storages, of which garbage may reference some.
    """
    wanted = {allocation.key: allocation for allocation in allocations}
    with torch_private.no_torch_function():  # the user's modes must not see these calls
        holders = _holders_of(garbage, wanted)
        cycles = _Cycles(garbage)
        texts: dict[object, tuple[str, str]] = {}
        described: DescribedGarbage = []
        for key, path in holders.items():
            allocation = wanted[key]
            place = site_key(allocation.site), type(path.garbage)
            if place not in texts:
                texts[place] = cycles.text_about(path)
            held_by, hint = texts[place]
            holding = holding_of(allocation.bytes, 1, allocation.site)
            dtype, shape = dtype_and_shape_of(path.value)
            if holding.shape is None:
                holding = replace(holding, dtype=dtype, shape=shape)
            described.append((allocation, replace(holding, held_by=held_by, hint=hint)))
    return described


def live_holdings(described: DescribedGarbage) -> tuple[Holding, ...]:
    """Group what :func:`described_garbage` has returned, largest first."""
    return grouped(
        [Entry(holding, (site_key(each.site), holding.held_by)) for each, holding in described]
    )


def freed_holdings(
    described: DescribedGarbage, collected: Iterable[Allocation], cycle_bytes: int
) -> tuple[Holding, ...]:
    """Group what is no longer live, largest first.

    Args:
        described: what :func:`described_garbage` has returned, before the garbage was freed.
        collected: what collections have freed. What is not in `described` joins its group of the
            same line, if there is one.
        cycle_bytes: what the groups add up to; the last may be the rest, of which no more is known.
    """
    gone = {each.serial: (each, holding) for each, holding in described if not each.is_live()}
    entries = [
        Entry(holding, (site_key(each.site), holding.held_by)) for each, holding in gone.values()
    ]
    cycles = {site_key(each.site): holding.held_by for each, holding in gone.values()}
    known_bytes = sum(entry.holding.bytes for entry in entries)
    others = {each.serial: each for each in collected if each.serial not in gone}
    for each, size in _with_requested_bytes([*others.values()], cycle_bytes - known_bytes):
        key = site_key(each.site)
        hint = None if key in cycles else _NOT_DESCRIBED
        holding = replace(holding_of(size, 1, each.site), held_by=cycles.get(key), hint=hint)
        entries.append(Entry(holding, (key, holding.held_by)))
    holdings = grouped(entries)
    rest_bytes = cycle_bytes - sum(holding.bytes for holding in holdings)
    if rest_bytes <= 0:
        return holdings
    return (*holdings, Holding(bytes=rest_bytes, count=0, hint=_NOT_DESCRIBED))


def _with_requested_bytes(
    allocations: Sequence[Allocation], most_bytes: int
) -> Iterator[tuple[Allocation, int]]:
    """Yield allocations with bytes that add up to `most_bytes` at most.

    Of a block that an accelerator's allocator has freed, only the rounded size is known.
    """
    block_bytes = sum(each.bytes for each in allocations)
    left = min(block_bytes, most_bytes)
    for number, each in enumerate(allocations, 1):
        share = each.bytes * min(block_bytes, most_bytes) // max(1, block_bytes)
        share = left if number == len(allocations) else share
        left -= share
        yield each, share


def _holders_of(garbage: Sequence[Any], wanted: Mapping[int, Any]) -> dict[int, _Path]:
    """Return for each key in `wanted` how garbage leads to the object that has it."""
    rules_for, known = tensor_rules(), dict[type, TypeRules | None]()
    paths: dict[int, _Path] = {}
    seen = {id(value): value for value in garbage}
    queue = deque(_Path(value, "", value) for value in garbage)
    while queue:
        path = queue.popleft()
        kind = type(path.value)
        if kind not in known:
            known[kind] = rules_for(kind)
        rules = known[kind]
        if rules is None:
            continue
        for key in rules.keys(path.value):
            if key in wanted:
                paths.setdefault(key, path)
        for text, child in rules.extra_references(path.value):
            if id(child) not in seen:
                seen[id(child)] = child
                queue.append(_Path(path.garbage, f"{path.text}{text}", child))
    return paths


class _Cycles:
    """The references between the objects that are garbage."""

    def __init__(self, garbage: Sequence[Any]) -> None:
        objects = {id(value): value for value in garbage}
        self._referents: dict[int, list[Any]] = {}
        self._referrers: defaultdict[int, list[Any]] = defaultdict(list)
        for value in garbage:
            inside = [objects[id(it)] for it in get_referents(value) if id(it) in objects]
            self._referents[id(value)] = inside
            for referent in inside:
                self._referrers[id(referent)].append(value)

    def text_about(self, path: _Path) -> tuple[str, str]:
        """Return how a cycle holds the end of `path`, and what to do."""
        holders, cycle = self._holders_in_a_cycle(path.garbage)
        if not cycle:
            return class_name(type(path.garbage)), _OBJECTS
        cycle = _turned(cycle)
        # The last station is the garbage object itself, which the text before it leads to.
        held = " -> ".join(list(_stations(holders))[:-1]) or _name_of(path.garbage)
        ring = " -> ".join(_stations(cycle))
        return f"{shortened(f'{held}{path.text}')}, in the cycle {ring}", _advice(cycle)

    def _holders_in_a_cycle(self, value: Any) -> tuple[list[Any], list[Any]]:
        """Return a path to `value` from an object in a cycle, and the cycle; empty if none is.

        The dict of an object's attributes may be nearer than the object, which has a name.
        """
        nearest: tuple[list[Any], list[Any]] = [], []
        for holders in self._paths_to(value):
            if nearest[0] and len(holders) > len(nearest[0]) + 1:
                break
            cycle = self._cycle_through(holders[0])
            if cycle and type(holders[0]) not in _UNNAMED:
                return holders, cycle
            if cycle and not nearest[0]:
                nearest = holders, cycle
        return nearest

    def _paths_to(self, value: Any) -> Iterator[list[Any]]:
        """Yield paths that end at `value`, shortest first; each begins at another object."""
        queue, seen = deque([[value]]), {id(value)}
        while queue and len(seen) < _MOST_SEARCHED:
            path = queue.popleft()
            yield path
            for referrer in self._referrers[id(path[0])]:
                if id(referrer) not in seen:
                    seen.add(id(referrer))
                    queue.append([referrer, *path])

    def _cycle_through(self, value: Any) -> list[Any]:
        """Return a shortest path from `value` to itself; empty if there is none."""
        queue, seen = deque([[value]]), set[int]()
        while queue and len(seen) < _MOST_SEARCHED:
            path = queue.popleft()
            for referent in self._referents[id(path[-1])]:
                if referent is value:
                    return [*path, value]
                if id(referent) not in seen:
                    seen.add(id(referent))
                    queue.append([*path, referent])
        return []


def _turned(cycle: Sequence[Any]) -> list[Any]:
    """Return the same cycle from an object that has a name in the text, if there is one."""
    ring = cycle[:-1]
    start = next((n for n, it in enumerate(ring) if type(it) not in _UNNAMED), 0)
    return [*ring[start:], *ring[:start], ring[start]]


def _stations(path: Sequence[Any]) -> Iterator[str]:
    """Yield the objects on a path that have names, each with the attributes that lead onward.

    A list or a closure between two of them has no name of its own, so it is a part of the text.
    """
    text, number = _name_of(path[0]), 0
    while number < len(path) - 1:
        parent, child = path[number], path[number + 1]
        rest = path[number + 1 :]
        number += 1
        if type(parent) is FunctionType and child is parent.__closure__ and len(rest) > 2:
            index = [id(cell) for cell in parent.__closure__ or ()].index(id(rest[1]))
            yield f"{shortened(text)} ({_place_of(parent)})"
            text, number = f"closure variable {parent.__code__.co_freevars[index]}", number + 2
            child = path[number]
        elif type(parent) is FrameType:
            names = [name for name, value in locals_of(parent).items() if value is child]
            local = f"local variable {names[0]}" if names else "frame"
            text = f"{local} of {parent.f_code.co_name}"
        elif type(child) is FrameType:
            yield shortened(text)
            text = _name_of(child)
        elif type(child) is not TracebackType or type(parent) is not TracebackType:
            text += text_of(parent, child)
        if type(child) not in _UNNAMED:
            yield shortened(text)
            text = _name_of(child)
    yield shortened(text)


def _place_of(function: FunctionType) -> str:
    """Return the name of a function and the line of its definition."""
    code = function.__code__
    return f"{function.__name__} at {shown(code.co_filename)}:{code.co_firstlineno}"


def _name_of(value: Any) -> str:
    if type(value) is FrameType:
        return f"frame of {value.f_code.co_name}"
    if type(value) is FunctionType:
        return value.__name__
    return class_name(type(value))


def _advice(cycle: Sequence[Any]) -> str:
    if any(issubclass(type(value), (BaseException, TracebackType)) for value in cycle):
        return _EXCEPTION
    if any(type(value) is MethodType for value in cycle):
        return _METHOD
    if any(type(value) is CellType for value in cycle):
        return _CLOSURE
    return _OBJECTS
