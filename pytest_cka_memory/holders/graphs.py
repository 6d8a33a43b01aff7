"""Advice on autograd graphs that grow from batch to batch, because state is computed from itself.

``total = total + loss`` keeps one tensor, whose graph reaches back through all batches.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pytest_cka_memory.holders import expressions
from pytest_cka_memory.holders.search import Reference
from pytest_cka_memory.holders.torch_references import dtype_and_shape_of
from pytest_cka_memory.meters.autograd_nodes import is_node

_GROWS = (
    "the autograd graph of `{}` reaches back through several batches, because each of them "
    "computes it from its last value{}: {}"
)
_NUMBER = "add loss.item() to it instead of the loss"
_STATE = "detach it in each batch, as in `{0} = {0}.detach()`, or compute it in torch.no_grad()"


def advice(
    paths: Sequence[Sequence[Reference]], batches: int | None, made: Callable[[Any], str]
) -> str | None:
    """Return what to do if the graph of one tensor holds storages of several batches, or None.

    Args:
        paths: for each storage, the references from a root to its holder.
        batches: in how many batches they were allocated; None if the region has no batches.
        made: returns which code made a tensor, as `` by `total + loss` at net.py:3``, or nothing.
    """
    if not paths or (batches or 0) < 2:
        return None
    path = paths[0]
    head = next((number for number, step in enumerate(path) if is_node(type(step.value))), 0)
    if head == 0 or not all(_is_of_graph(each, path[head - 1]) for each in paths):
        return None
    root = path[0].root
    name = expressions.expression_of(path[:head]).removesuffix("" if root is None else root.suffix)
    _, shape = dtype_and_shape_of(path[head - 1].value)
    is_number = shape is not None and math.prod(shape) == 1
    what = _NUMBER if is_number else _STATE.format(name)
    return _GROWS.format(name, made(path[head - 1].value), what)


def _is_of_graph(path: Sequence[Reference], head: Reference) -> bool:
    """Whether a path ends at a tensor, or leads from it to its end through nodes alone."""
    numbers = [number for number, step in enumerate(path) if step.value is head.value]
    if not numbers or dtype_and_shape_of(head.value)[0] is None:
        return False
    return all(is_node(type(step.value)) for step in path[numbers[0] + 1 : -1])
