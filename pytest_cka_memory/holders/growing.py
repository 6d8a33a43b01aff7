"""Find what grows from batch to batch: storages, the autograd graph of one tensor, a container.

A storage explains growth if several batches have allocated one like it, or if each batch replaces
it by a larger one. ``total = total + loss`` keeps one tensor, whose graph reaches back through all
batches; while ``sum(losses)`` or ``functools.reduce(...)`` runs, only C code references it.
``total += loss`` after ``loss.backward()`` keeps nodes of C++ alone: these are in the memory of the
process, but not of torch's allocator.
"""

import gc
import types
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.core.places import OWN_FOLDERS
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.holders import (
    Paths,
    Reference,
    ReferencePath,
    frame_roots,
    module_roots,
)
from pytest_cka_memory.holders.expressions import (
    is_own_dict,
    local_expression_of,
    remembering_places,
    without_root,
)
from pytest_cka_memory.holders.references import tensor_rules
from pytest_cka_memory.holders.search import RulesForType, TypeRules, search
from pytest_cka_memory.holders.tensors import dtype_and_shape_of, has_one_element, label
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.collector import without_collections
from pytest_cka_memory.meters.objects import grad_fn_of, is_node

_REBUILT = "each batch replaces `{}` by a larger one; limit its length, or empty it between batches"
_GROWS = (
    "the autograd graph of `{}` reaches back through several batches, because each batch "
    "computes it from its last value{}; {}"
)
_OF_C_CODE = (
    "C or C++ code, such as a running sum(), references a tensor{} whose autograd graph "
    "reaches back through several batches; {}"
)
_NUMBER = "add loss.item() to the sum instead of the loss"
_NODES = (
    "the autograd graph of {} keeps nodes of every batch; they take host memory that is not in "
    "tensors; {}"
)
_LOSSES = (
    f"{_NUMBER}; if backward() is called on the sum, call it on the loss of each batch instead"
)
_EACH_STATE = "compute each new value from a detach() of the previous one, or in torch.no_grad()"
_STATE = "detach it in each batch, as in `{0} = {0}.detach()`, or compute it in torch.no_grad()"
_FEWEST = 5
"""Batches that a graph must have nodes of."""
_MUCH_LARGER = 4
"""Batches differ in size, so what a line allocates in each of them may, too."""
_MOST_NODES = 200_000
"""Nodes after which the search stops, so that its time is bounded."""
_DEEPEST = 10_000
"""Nodes in a row that are visited. In torch 2.14, to free a row of 60,000 nodes that have had a
Python object overflows the stack."""
_GROWING = (list, dict, deque, set)
_OF_MODULES = ("_parameters", "_buffers", "_modules")


def growing_holdings(
    holdings: Iterable[Holding], early: Iterable[Allocation], batches: int
) -> tuple[Holding, ...]:
    """Return the storages that explain that a level rises from batch to batch.

    They were allocated in several batches, or each batch rebuilds them larger. What explains most
    bytes per batch comes first.

    Args:
        holdings: what is live now.
        early: what was live at an early batch boundary; it may have been freed since.
        batches: how many batches have ended since that boundary.
    """
    kept: list[Holding] = []
    others: list[Holding] = []
    for holding in holdings:
        (kept if (holding.batches or 0) > 1 else others).append(holding)
    # What was only kept in the first batches, such as a cache that is full, explains no growth.
    kept = [holding for holding in kept if holding.bytes_per_batch] or kept
    lines: dict[object, list[int]] = {}
    for number, holding in enumerate(kept):
        if holding.created_at:
            lines.setdefault(_line_of(holding.created_at, holding.code), []).append(number)
    separate: list[Holding] = []
    for holding in others:
        # The last tensor of a list is often the value of a variable, too, and found there.
        of_line = lines.get(_line_of(holding.created_at, holding.code), ())
        similar = [number for number in of_line if not _is_larger(holding, kept[number])]
        if not similar:
            separate.append(holding)
            continue
        number = min(similar, key=lambda it: kept[it].bytes / max(1, kept[it].count))
        per_batch = (kept[number].bytes_per_batch or 0) + (holding.bytes_per_batch or 0)
        kept[number] = replace(kept[number], bytes_per_batch=per_batch)
    replaced = _rebuilt(separate, early, batches)
    order = sorted([*kept, *replaced], key=lambda it: (-(it.bytes_per_batch or 0), -it.bytes))
    return tuple(order)


def _is_larger(holding: Holding, kept: Holding) -> bool:
    """Whether the tensors of a holding are too large to be more of the kept ones.

    A line that calls a function, such as a loss, also allocates what that needs for its own work.
    """
    return holding.bytes * kept.count > _MUCH_LARGER * kept.bytes * holding.count


def explained_bytes(grown: Iterable[Holding]) -> float:
    """Return how many bytes per batch the holdings of :func:`growing_holdings` explain."""
    return sum(holding.bytes_per_batch or 0 for holding in grown)


class _Before(NamedTuple):
    """The storages that a line of code had allocated and that were live at an early boundary."""

    bytes: int = 0
    freed: int = 0
    """How many of its tensors have been freed since."""


def _rebuilt(
    holdings: Iterable[Holding], early: Iterable[Allocation], batches: int
) -> list[Holding]:
    """Return the storages that take more bytes than those in `early` of the same line of code.

    ``state = torch.cat([state, batch])`` allocates a larger tensor in each batch and frees the one
    before, so that nothing is kept from batch to batch.
    """
    before: dict[object, _Before] = {}
    for allocation in early:
        if (site := allocation.site) is not None:
            line = _line_of(site.frames, site.code)
            known = before.get(line, _Before())
            freed = known.freed + (not allocation.is_live())
            before[line] = _Before(known.bytes + allocation.bytes, freed)
    lines: dict[object, list[Holding]] = {}
    for holding in holdings:
        if holding.created_at:
            lines.setdefault(_line_of(holding.created_at, holding.code), []).append(holding)
    grown = []
    for line, now in lines.items():
        size, count = sum(it.bytes for it in now), sum(it.count for it in now)
        known = before.get(line, _Before())
        if known.bytes and size > known.bytes:
            # A linked list, or a cache that is full, has freed none that a new one could replace.
            name = now[0].held_by if 0 < count <= known.freed else None
            hint = _REBUILT.format(without_root(name)) if name else now[0].hint
            per_batch = (size - known.bytes) / max(1, batches)
            grown.append(
                replace(
                    now[0],
                    bytes=size,
                    count=count,
                    early_bytes=known.bytes,
                    bytes_per_batch=per_batch,
                    hint=hint,
                )
            )
    return grown


def _line_of(frames: Sequence[str], code: str | None) -> object:
    return tuple(frames[:1]), code


def graph_advice(
    paths: Paths | None, batches: int | None, made: Callable[[Any], str]
) -> str | None:
    """Return what to do if the graph of one tensor holds storages of several batches, or None.

    Args:
        paths: those to the holders of the storages; None if none were found.
        batches: in how many batches they were allocated; None if the region has no batches.
        made: returns which code made a tensor, as `` by `total + loss` at net.py:3``, or nothing.
    """
    if paths is None or (batches or 0) < 2:
        return None
    path = paths.first
    head = next(
        (number for number, reference in enumerate(path) if is_node(type(reference.value))), 0
    )
    if head == 0 or dtype_and_shape_of(path[head - 1].value)[0] is None:
        return None
    if not paths.all_lead_through(path[head - 1].value, is_node):
        return None
    made_by = made(path[head - 1].value)
    name = local_expression_of(path[:head])
    if not has_one_element(path[head - 1].value):
        what = _STATE.format(name)
    elif has_one_element(path[-1].value):
        what = _NUMBER
    else:  # backward() frees activations, so perhaps it is called on the sum
        what = _LOSSES
    return _GROWS.format(name, made_by, what)


def head_in_c_code(path: ReferencePath) -> Any:
    """Return the tensor through whose graph `path` leads from C code to its end, otherwise None.

    C code may reference it as one of the arguments of a call, which are a tuple.
    """
    head = (
        next((number for number, reference in enumerate(path) if is_node(type(reference.value))), 0)
        - 1
    )
    if head < 0 or any(type(reference.value) not in (tuple, list) for reference in path[:head]):
        return None
    return path[head].value if _is_of_graph(path, path[head]) else None


def graph_advice_of_c_code(
    path: ReferencePath, batches: int | None, made: Callable[[Any], str]
) -> str | None:
    """Return what to do if a graph held by C code holds storages of several batches, or None.

    Args:
        path: from the object that C code references to the largest of the storages.
        batches: in how many batches they were allocated; None if the region has no batches.
        made: as for :func:`graph_advice`.
    """
    head = head_in_c_code(path)
    if (batches or 0) < 2 or head is None:
        return None
    made_by = made(head)
    what = _LOSSES if has_one_element(head) else _EACH_STATE
    return _OF_C_CODE.format(made_by and f", made{made_by},", what)


def _is_of_graph(path: ReferencePath, head: Reference) -> bool:
    """Whether a path ends at a tensor, or leads from it to its end through nodes alone."""
    numbers = [number for number, reference in enumerate(path) if reference.value is head.value]
    if not numbers or dtype_and_shape_of(head.value)[0] is None:
        return False
    return all(is_node(type(reference.value)) for reference in path[numbers[0] + 1 : -1])


def growing_graph(boundaries: Sequence[int]) -> str | None:
    """Return which graph has nodes of every batch after the first, and what to do, or None.

    Args:
        boundaries: what :data:`.torch_private.sequence_number` has returned at each boundary.
    """
    if len(boundaries) <= _FEWEST or any(
        later <= earlier for earlier, later in pairwise(boundaries)
    ):
        return None
    with torch_private.no_torch_function(), remembering_places():
        # A collection during the search would only cost time.
        return without_collections(lambda: _advice_of_growing(boundaries))


def _advice_of_growing(boundaries: Sequence[int]) -> str | None:
    tensor = _newest_with_every_batch(boundaries)
    return None if tensor is None else advice_of_nodes(tensor, _name_of_tensor(tensor))


def _newest_with_every_batch(boundaries: Sequence[int]) -> Any:
    """Return a tensor whose graph has nodes of every batch: of several, the one computed last."""
    known = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    computed = [(node, tensor) for tensor in known if (node := grad_fn_of(tensor)) is not None]
    seen: set[Any] = set()
    for node, tensor in sorted(computed, key=lambda each: -torch_private.number_of_node(each[0])):
        if node not in seen and _batches_of(node, boundaries, seen) >= len(boundaries) - 1:
            return tensor
    return None


def _batches_of(node: Any, boundaries: Sequence[int], seen: set[Any]) -> int:
    """Return of how many batches a graph has nodes, and add its nodes to `seen`.

    A node that is older than the first boundary leads to none that is newer.
    """
    batches = set()
    seen.add(node)
    todo = [(node, 1)]
    while todo and len(seen) < _MOST_NODES:
        node, depth = todo.pop()
        number = torch_private.number_of_node(node)
        if number < boundaries[-1]:  # that of a parameter's node is the highest there is
            batches.add(bisect_right(boundaries, number))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                if torch_private.number_of_node(following) >= boundaries[0] and depth < _DEEPEST:
                    todo.append((following, depth + 1))
    return len(batches - {0})


def advice_of_nodes(tensor: Any, name: str) -> str:
    """Return what to do about a tensor whose graph has nodes of every batch."""
    return _NODES.format(name, _NUMBER if has_one_element(tensor) else _EACH_STATE)


def _name_of_tensor(tensor: Any) -> str:
    """Return an expression for a tensor; its class and shape if no name leads to it."""
    roots = [*frame_roots(lambda file: file.startswith(OWN_FOLDERS)), *module_roots()]
    early, late = ([root for root in roots if root.is_library == it] for it in (False, True))
    tree = search(_rules_for(tensor), [id(tensor)], early, late).tree
    if id(tensor) not in tree:
        return f"`{label(tensor)}`, which no name leads to,"
    path = tree.path(id(tensor))
    suffix = "" if path[0].root is None else path[0].root.suffix
    return f"`{local_expression_of(path)}`{suffix}"


def _rules_for(tensor: Any) -> RulesForType:
    """Return rules by which a search finds this tensor itself instead of its storage."""
    of_tensors = tensor_rules({})

    def rules(kind: type) -> TypeRules | None:
        known = of_tensors(kind)
        if kind is not type(tensor):
            return known
        references = TypeRules().extra_references if known is None else known.extra_references
        return TypeRules(lambda value: (id(value),) if value is tensor else (), references)

    return rules


class Container(NamedTuple):
    """A list, dict, deque or set, and how many of its entries lead to the storages of a group."""

    path: ReferencePath
    """From a root to the container."""
    entries: int

    @property
    def name(self) -> str:
        """How users call it: an expression, or the name of a variable that a closure keeps."""
        if len(self.path) > 3 and type(self.path[-2].value) is types.CellType:
            function, cell = self.path[-4].value, self.path[-2].value
            if type(function) is types.FunctionType and cell in (function.__closure__ or ()):
                number = [id(each) for each in function.__closure__ or ()].index(id(cell))
                variable = function.__code__.co_freevars[number]
                closure = local_expression_of(self.path[:-3])
                return f"`{variable}`, a variable of the closure `{closure}`,"
        return f"`{local_expression_of(self.path)}`"

    @property
    def is_a_local(self) -> bool:
        """Whether it is itself a variable, of a function that runs."""
        return len(self.path) == 1


def shared_container(paths: Paths) -> Container | None:
    """Return the container at which the paths of a group branch; None if they branch elsewhere."""
    shared = paths.shared
    if len(shared) == 0 or not _is_growing(shared[-1], shared[:-1]):
        return None
    return Container(shared, paths.branches)


def container_before(paths: Paths, kind: type) -> Container | None:
    """Return the innermost container on the way to an object of a class; None if there is none.

    Args:
        paths: those of a group; the first decides.
        kind: the class. The entries of the container are counted by these objects.
    """
    before = list(
        takewhile(lambda reference: not issubclass(type(reference.value), kind), paths.first)
    )
    while before and not _is_growing(before[-1], before[:-1]):
        before.pop()
    if not before or len(before) == len(paths.first):
        return None
    return Container(before, paths.objects_of(kind))


def _is_growing(reference: Reference, before: ReferencePath) -> bool:
    """Whether an object is a container that the user fills, not a part of an object of torch."""
    if not issubclass(type(reference.value), _GROWING):
        return False
    if any(issubclass(type(each.value), torch.optim.Optimizer) for each in before):
        return False
    parent = reference.parent
    if parent is None or not issubclass(type(reference.value), dict):
        return True
    # Where Python keeps attributes in a dict, that comes between.
    owners = [parent, *(each.parent for each in before if each.value is parent)]
    modules = [it for it in owners if issubclass(type(it), torch.nn.Module)]
    if any(reference.value is vars(module).get(name) for module in modules for name in _OF_MODULES):
        return False
    return not is_own_dict(reference.value, parent)
