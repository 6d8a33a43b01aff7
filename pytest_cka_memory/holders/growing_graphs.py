"""Find the tensor whose autograd graph has nodes of every batch, also if it saves no tensor.

``total += loss`` after ``loss.backward()`` keeps nodes of C++ alone, which are in the memory of the
process, but not of torch's allocator.
"""

import gc
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pytest_cka_memory.core.libraries import OWN_FOLDERS
from pytest_cka_memory.holders import expressions, graphs
from pytest_cka_memory.holders.loops import label
from pytest_cka_memory.holders.roots import frame_roots, module_roots
from pytest_cka_memory.holders.search import RulesForType, TypeRules, search
from pytest_cka_memory.holders.torch_references import tensor_rules
from pytest_cka_memory.meters.autograd_nodes import grad_fn_of

_FEWEST = 5
"""Batches that a graph must have nodes of."""
_MOST_NODES = 200_000
_DEEPEST = 10_000
"""Nodes in a row that are looked at. In torch 2.14, to free a row of 60,000 nodes that have had a
Python object overflows the stack."""


def growing_graph(boundaries: Sequence[int]) -> str | None:
    """Return which graph has nodes of every batch after the first, and what to do, or None.

    Args:
        boundaries: what :data:`.torch_private.sequence_number` has returned at each boundary.
    """
    from pytest_cka_memory.meters.torch_private import no_torch_function

    if len(boundaries) <= _FEWEST or any(
        later <= earlier for earlier, later in pairwise(boundaries)
    ):
        return None
    was_enabled = gc.isenabled()
    gc.disable()  # a collection during the search would only cost time
    try:
        with no_torch_function(), expressions.remembering_places():
            tensor = _newest_with_every_batch(boundaries)
            return None if tensor is None else graphs.advice_of_nodes(tensor, _name_of(tensor))
    finally:
        if was_enabled:
            gc.enable()


def _newest_with_every_batch(boundaries: Sequence[int]) -> Any:
    """Return the tensor, of several the one that was computed last."""
    import torch

    from pytest_cka_memory.meters.torch_private import number_of_node

    known = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    computed = [(node, tensor) for tensor in known if (node := grad_fn_of(tensor)) is not None]
    seen: set[Any] = set()
    for node, tensor in sorted(computed, key=lambda each: -number_of_node(each[0])):
        if node not in seen and _batches_of(node, boundaries, seen) >= len(boundaries) - 1:
            return tensor
    return None


def _batches_of(node: Any, boundaries: Sequence[int], seen: set[Any]) -> int:
    """Return of how many batches a graph has nodes, and add its nodes to `seen`.

    A node that is older than the first boundary leads to none that is newer.
    """
    from pytest_cka_memory.meters.torch_private import number_of_node

    batches = set()
    seen.add(node)
    todo = [(node, 1)]
    while todo and len(seen) < _MOST_NODES:
        node, depth = todo.pop()
        number = number_of_node(node)
        if number < boundaries[-1]:  # that of a parameter's node is the highest there is
            batches.add(bisect_right(boundaries, number))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                if number_of_node(following) >= boundaries[0] and depth < _DEEPEST:
                    todo.append((following, depth + 1))
    return len(batches - {0})


def _name_of(tensor: Any) -> str:
    """Return an expression for a tensor; its class and shape if no name leads to it."""
    roots = [*frame_roots(lambda file: file.startswith(OWN_FOLDERS)), *module_roots()]
    early, late = ([root for root in roots if root.is_library == it] for it in (False, True))
    tree = search(_rules_for(tensor), [id(tensor)], early, late).tree
    if id(tensor) not in tree:
        return f"`{label(tensor)}`, which no name leads to,"
    path = tree.path(id(tensor))
    suffix = "" if path[0].root is None else path[0].root.suffix
    return f"`{expressions.expression_of(path).removesuffix(suffix)}`{suffix}"


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
