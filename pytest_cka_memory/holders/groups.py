"""Memory in groups: by where it was allocated, by what it was for, and by how it is held.

What it was for is a kind, such as weights, gradients or activations. What has been freed since a
peak is judged by what ran when it was allocated and by what freed it: memory that a backward pass
frees was kept for it. How it is held is a pattern: a number, so that to group a million storages
writes no expression for each.
"""

import ast
import gc
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.core.allocations import AllocationGroup, AllocationSite, Context, Freed
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.sentences import (
    ACTIVATIONS,
    GRADIENTS,
    IN_POOLS,
    INPUTS,
    OPTIMISER,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
)
from pytest_cka_memory.holders import Reference, ReferenceTree, tensors
from pytest_cka_memory.holders.expressions import is_own_dict, text_of, without_places
from pytest_cka_memory.holders.references import tensor_rules
from pytest_cka_memory.holders.search import RulesForType
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.objects import grad_fn_of, gradient_of, is_node
from pytest_cka_memory.units import counted

_CREATES = frozenset(
    {"arange", "as_tensor", "asarray", "empty", "eye", "from_dlpack", "from_numpy", "frombuffer"}
    | {"full", "linspace", "normal", "ones", "rand", "randint", "randn", "randperm", "tensor"}
    | {"zeros", "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like"}
    | {"zeros_like", "cpu", "cuda", "next", "pin_memory", "to", "xpu"}
)
"""Functions and methods that compute nothing: they create a tensor, or copy one to a device."""
_OF_CONTEXT = {
    Context.BACKWARD: GRADIENTS,
    Context.STATE: OPTIMISER,
    Context.LOADER: INPUTS,
    Context.MODULE: PARAMETERS,
}
_KEPT = (Freed.IN_BACKWARD, Freed.WITH_GRAPH)
"""How memory is freed that an autograd graph has kept."""
_NO_GRAD = (
    "if no backward pass follows, compute it in torch.no_grad(); an autograd graph keeps it for a "
    "backward pass, but no backward pass has freed it"
)
_ENTRY = "[]"
_OF_GRAPH = ".grad_fn"
_OF_MODULES = {"._parameters", "._buffers", "._modules"}
"""Dicts of a module in which each key is also the name of an attribute of the module."""
_CONTAINERS = (list, tuple, deque, set, frozenset)


class Entry(NamedTuple):
    """Memory from one place, described."""

    holding: Holding
    group: tuple[object, ...]
    """Equal for memory that belongs to one group."""
    module: int = 0
    """Identity of the module that allocated it; 0 if unknown."""


def group_by_site(
    groups: Sequence[AllocationGroup], in_pools: Collection[int] = ()
) -> tuple[Holding, ...]:
    """Merge `groups`, live or freed, by allocation site and kind, largest first.

    Everything that was allocated before the region comes last, by its kind alone.

    Args:
        groups: what was live at a peak.
        in_pools: the addresses of the blocks that are in private pools now.
    """
    inside = [group for group in groups if not group.before_region]
    early = [group for group in groups if group.before_region]
    with torch_private.no_torch_function():  # the user's modes must not see these calls
        if not any(group.context is not None or group.older is not None for group in groups):
            entries = [_entry_of(group, None) for group in inside]
            counts = (Holding(bytes=group.bytes, count=group.count) for group in early)
            before = grouped(Entry(holding, ()) for holding in counts)
        else:
            older = [{} if group.older is None else group.older() for group in early]
            blocks = {group.address: group.bytes for group in inside if group.address}
            older_blocks = {key: size for known in older for key, size in known.items()}
            kinds = KindsNow(older_blocks | blocks, in_pools)
            kind_of_each = [kinds.kind_of(group) for group in inside]
            hint = peak_advice(inside, kind_of_each)
            entries = [
                _entry_of(group, kind, hint if kind == ACTIVATIONS else None)
                for group, kind in zip(inside, kind_of_each, strict=True)
            ]
            before = tuple(
                Holding(bytes=size, count=0, kind=kind)
                for group, known in zip(early, older, strict=True)
                for kind, size in kinds.kinds_of_older(group.bytes, known).items()
            )
        return (*grouped(entries), *(replace(holding, before_region=True) for holding in before))


def grouped(entries: Iterable[Entry]) -> tuple[Holding, ...]:
    """Return one holding for each group, largest first."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    modules = tensors.module_paths(
        {entry.module for members in groups.values() for entry in members if entry.module}
    )
    merged = []
    for members in groups.values():
        largest = max(members, key=lambda entry: entry.holding.bytes)
        sizes = ((entry.module, entry.holding.bytes) for entry in members)
        merged.append(
            replace(
                largest.holding,
                bytes=sum(entry.holding.bytes for entry in members),
                count=sum(entry.holding.count for entry in members),
                created_at=_callers_of_all(largest.holding, members),
                module=tensors.largest_modules(sizes, modules),
            )
        )
    return tuple(sorted(merged, key=lambda holding: -holding.bytes))


def _callers_of_all(largest: Holding, members: Sequence[Entry]) -> tuple[str, ...]:
    """Return the frames of the largest member, up to where those of other members differ."""
    frames = largest.created_at
    for depth in range(1, len(frames)):
        paths = {entry.holding.created_at[1 : depth + 1] for entry in members} - {()}
        if len(paths) > 1:
            return (*frames[:depth], f"{frames[depth]} and {counted(len(paths) - 1, 'other line')}")
    return frames


def _entry_of(group: AllocationGroup, kind: str | None, hint: str | None = None) -> Entry:
    site = None if group.recorded is None else group.recorded.readable()
    count = group.count if group.inside is None else 0
    holding = holding_of(group.bytes, count, site)
    holding = replace(holding, inside=group.inside, kind=kind, hint=hint)
    return Entry(holding, (site_key(site), group.inside, kind), module_id_of(site))


def module_id_of(site: AllocationSite | None) -> int:
    """Return the identity of the module that allocated at a site; 0 if unknown."""
    return 0 if site is None else site.module


def holding_of(size: int, count: int, site: AllocationSite | None) -> Holding:
    """Return a description of `count` storages of `size` bytes in all that a site allocated."""
    if site is None:
        return Holding(bytes=size, count=count)
    return Holding(
        bytes=size,
        count=count,
        dtype=site.dtype,
        shape=site.shape,
        operator=site.operator,
        created_at=site.frames,
        code=site.code,
    )


def site_key(site: AllocationSite | None) -> tuple[object, ...]:
    """Return what is equal for allocations of one line by the same expression and operator."""
    return () if site is None else (site.frames[:1], site.code, site.operator)


class KindsNow:
    """Classifies memory at a peak: as weights, gradients, activations, and so on.

    Memory that is still live is classified by what references it when this is created, and memory
    that has been freed by how it was allocated and freed.
    """

    def __init__(self, blocks: Mapping[int, int], in_pools: Collection[int] = ()) -> None:
        """Look at all tensors, modules and optimizers.

        Args:
            blocks: the addresses of blocks that are live, and how many bytes each has.
            in_pools: the addresses of those in private pools.
        """
        self._in_pools = in_pools
        self.known: dict[int, str] = {}
        """Address of a tensor's data -> its kind."""
        self.saved: set[int] = set()
        """Addresses of the data that graphs of autograd have kept."""
        tensors, modules, optimizers = _objects()
        rules = tensor_rules(blocks)
        # A graph keeps parameters whose module is gone.
        parameters = (it for it in tensors if issubclass(type(it), torch.nn.Parameter))
        self._note(PARAMETERS, parameters, rules)
        for module in modules:
            self._note(PARAMETERS, _tensors_of_module(module), rules)
        for optimizer in optimizers:
            groups = (group["params"] for group in optimizer.param_groups)
            self._note(PARAMETERS, (tensor for group in groups for tensor in group), rules)
        gradients = (it for it in map(gradient_of, tensors) if it is not None)
        self._note(GRADIENTS, gradients, rules)
        for optimizer in optimizers:
            self._note(OPTIMISER, _tensors_in(optimizer.state), rules)
        self.saved = set(_saved_in_graphs(tensors, rules))

    def _note(self, kind: str, tensors: Iterable[Any], rules: RulesForType) -> None:
        for tensor in tensors:
            for key in _keys_of(tensor, rules):
                self.known.setdefault(key, kind)

    def kind_of(self, group: AllocationGroup) -> str:
        """Return the kind of memory that was allocated in the region and live at its peak."""
        if group.freed == Freed.WORKSPACE:
            return WORKSPACES
        if group.freed == Freed.IN_OPERATOR:
            return TEMPORARIES
        if group.address:
            return self._kind_of_live(group)
        if group.context == Context.BACKWARD and group.freed == Freed.IN_BACKWARD:
            return TEMPORARIES
        if group.context in _OF_CONTEXT:
            return _OF_CONTEXT[group.context]
        if group.context == Context.UNKNOWN and _is_created(group):
            return INPUTS
        return ACTIVATIONS if group.freed in _KEPT else TEMPORARIES

    def _kind_of_live(self, group: AllocationGroup) -> str:
        if group.address in self.known:
            return self.known[group.address]
        if group.context == Context.LOADER:
            return INPUTS
        if group.address in self.saved:
            return ACTIVATIONS
        if group.address in self._in_pools:
            return IN_POOLS
        if group.context == Context.UNKNOWN and _is_created(group):
            return INPUTS
        return _OF_CONTEXT.get(group.context or Context.UNKNOWN, OTHER)

    def kinds_of_older(self, peak_bytes: int, blocks: Mapping[int, int]) -> Mapping[str, int]:
        """Return the bytes of each kind of memory that is older than the region, largest first.

        Args:
            peak_bytes: how much of it was live at the peak.
            blocks: address and bytes of the blocks that are still live; the rest counts as other.
        """
        sizes: Counter[str] = Counter()
        for address, size in blocks.items():
            kept = IN_POOLS if address in self._in_pools else OTHER
            kept = ACTIVATIONS if address in self.saved else kept
            sizes[self.known.get(address, kept)] += size
        sizes[OTHER] += peak_bytes - sum(blocks.values())
        return {kind: size for kind, size in sizes.most_common() if size}


def _is_created(group: AllocationGroup) -> bool:
    """Whether the code of the innermost frame only creates a tensor, or copies one."""
    site: AllocationSite | None = None if group.recorded is None else group.recorded.readable()
    expression = None if site is None else site.expression or site.code
    return expression is not None and _only_creates(expression)


_LONGEST_PARSED = 5000
"""Characters; a longer expression is a literal, which takes long to parse."""


@lru_cache
def _only_creates(code: str) -> bool:
    if len(code) > _LONGEST_PARSED:
        return False
    try:
        statement = ast.parse(code).body[0]
    except (SyntaxError, IndexError):  # in Python 3.10, the first line of a longer statement
        return False
    except (ValueError, RecursionError, MemoryError):  # one that is nested deeply
        return False
    value = getattr(statement, "value", None)
    called = value.func if isinstance(value, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", None)) in _CREATES


def _objects() -> tuple[list[torch.Tensor], list[Any], list[Any]]:
    """Return all tensors, modules and optimizers that the garbage collector knows."""
    tensors, modules, optimizers = [], [], []
    for value in gc.get_objects():
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            tensors.append(value)
        elif issubclass(kind, torch.nn.Module):
            modules.append(value)
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(value)
    return tensors, modules, optimizers


def _tensors_of_module(module: Any) -> Iterator[torch.Tensor]:

    try:  # as nn.Module defines them: the user's class may override it
        yield from torch.nn.Module.parameters(module, recurse=False)
        yield from torch.nn.Module.buffers(module, recurse=False)
    except AttributeError:  # its __init__ has not run
        return


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if issubclass(type(value), torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors_in(part)


def _keys_of(value: Any, rules: RulesForType) -> Collection[int]:
    """Return the keys of a tensor's storages, among which are the addresses of their data."""
    of_type = rules(type(value))
    return () if of_type is None else of_type.keys(value)


def _saved_in_graphs(tensors: Iterable[torch.Tensor], rules: RulesForType) -> Iterator[int]:
    """Yield the keys of the storages that the graphs of these tensors have kept."""
    todo = [node for tensor in tensors if (node := grad_fn_of(tensor)) is not None]
    seen: set[Any] = set(todo)
    while todo:
        node = todo.pop()
        of_node = rules(type(node))
        for name, value in of_node.extra_references(node) if of_node is not None else ():
            if is_node(type(value)):
                if value not in seen:
                    seen.add(value)
                    todo.append(value)
            elif name != ".variable":
                for tensor in _tensors_in(value):
                    yield from _keys_of(tensor, rules)


def peak_advice(groups: Sequence[AllocationGroup], kinds: Sequence[str]) -> str | None:
    """Return how to free the memory that autograd graphs kept at a peak; None if it is uncertain.

    It is if a backward pass ran, which needs the graphs, or if they kept less than half.

    Args:
        groups: the memory that was allocated in the region.
        kinds: the kind of memory of each group.
    """
    if GRADIENTS in kinds or any(_is_of_backward(group) for group in groups):
        return None
    sizes = [(group.bytes, kind) for group, kind in zip(groups, kinds, strict=True)]
    kept_bytes = sum(size for size, kind in sizes if kind == ACTIVATIONS)
    return _NO_GRAD if kept_bytes and 2 * kept_bytes >= sum(size for size, _ in sizes) else None


def _is_of_backward(group: AllocationGroup) -> bool:
    return group.context == Context.BACKWARD or group.freed == Freed.IN_BACKWARD


class Patterns:
    """Gives the same number to objects of a tree that are held in the same way.

    Keys and indices do not count, nor how often the same step follows itself, as in a linked list.
    All objects that the graph of one tensor holds are equal, because each batch may add to a graph.
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
        """By the identity of a dict, whether its keys cannot be names of attributes."""

    def of(self, last: Reference) -> int:
        """Return a number that is equal for objects that are held in the same way."""
        number = self._of_entries.get(id(last.parent), 0)
        if number:
            return number
        inner = []
        reference = self._tree.before(last)
        while reference is not None:
            known = self._known.get(id(reference.value))
            if known is not None:
                number = known
                break
            inner.append(reference)
            reference = self._tree.before(reference)
        for reference in reversed(inner):
            number = self._known[id(reference.value)] = self._then(number, reference)
        pattern = self._then(number, last)
        if last.text is None and self._is_entry(last):
            self._of_entries[id(last.parent)] = pattern
        return pattern

    def _then(self, number: int, reference: Reference) -> int:
        """Return the number for what `reference` leads to, if `number` is that of its parent."""
        part = self._part(reference)
        before = self._steps[number]
        if not part or (before == part and part is not None) or before == _OF_GRAPH:
            return number
        following = self._numbers.setdefault((number, part), len(self._steps))
        if following == len(self._steps):  # it is new
            self._steps.append(part)
        return following

    def _part(self, reference: Reference) -> object:
        if reference.parent is None:
            return self._tree.start(reference)
        if reference.text is not None:
            return without_places(reference.text)
        if self._is_entry(reference):
            return _ENTRY
        if is_own_dict(reference.value, reference.parent):
            return ""
        if type(reference.parent) is dict:  # the attributes of an object
            return "." + without_places(text_of(reference.parent, reference.value)[2:-2])
        return without_places(text_of(reference.parent, reference.value))

    def _is_entry(self, reference: Reference) -> bool:
        """Whether a reference leads from a container to an entry, not to an object's attribute."""
        kind = type(reference.parent)
        return kind in _CONTAINERS or (kind is dict and self._has_entries(reference))

    def _has_entries(self, reference: Reference) -> bool:
        known = self._are_entries.get(id(reference.parent))
        if known is None:
            before = self._tree.before(reference)
            owner = None if before is None else before.parent
            known = owner is None or not (
                is_own_dict(reference.parent, owner)
                or (before is not None and self._part(before) in _OF_MODULES)
            )
            self._are_entries[id(reference.parent)] = known
        return known
