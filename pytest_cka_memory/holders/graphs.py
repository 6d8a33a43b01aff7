"""Advice on autograd graphs that grow from batch to batch, because state is computed from itself.

``total = total + loss`` keeps one tensor, whose graph reaches back through all batches.
"""

import math
from collections.abc import Callable
from typing import Any

from pytest_cka_memory.holders import expressions
from pytest_cka_memory.holders.torch_references import dtype_and_shape_of
from pytest_cka_memory.holders.tree import Paths
from pytest_cka_memory.meters.autograd_nodes import is_node

_GROWS = (
    "the autograd graph of `{}` reaches back through several batches, because each of them "
    "computes it from its last value{}: {}"
)
_NUMBER = "add loss.item() to it instead of the loss"
_STATE = "detach it in each batch, as in `{0} = {0}.detach()`, or compute it in torch.no_grad()"


def advice(paths: Paths | None, batches: int | None, made: Callable[[Any], str]) -> str | None:
    """Return what to do if the graph of one tensor holds storages of several batches, or None.

    Args:
        paths: those to the holders of the storages; None if none were found.
        batches: in how many batches they were allocated; None if the region has no batches.
        made: returns which code made a tensor, as `` by `total + loss` at net.py:3``, or nothing.
    """
    if paths is None or (batches or 0) < 2:
        return None
    path = paths.first
    head = next((number for number, step in enumerate(path) if is_node(type(step.value))), 0)
    if head == 0 or dtype_and_shape_of(path[head - 1].value)[0] is None:
        return None
    if not paths.all_lead_through(path[head - 1].value, is_node):
        return None
    root = path[0].root
    name = expressions.expression_of(path[:head]).removesuffix("" if root is None else root.suffix)
    _, shape = dtype_and_shape_of(path[head - 1].value)
    is_number = shape is not None and math.prod(shape) == 1
    what = _NUMBER if is_number else _STATE.format(name)
    return _GROWS.format(name, made(path[head - 1].value), what)
