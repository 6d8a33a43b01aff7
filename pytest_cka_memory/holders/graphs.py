"""Advice on autograd graphs that grow from batch to batch, because state is computed from itself.

``total = total + loss`` keeps one tensor, whose graph reaches back through all batches. While
``sum(losses)`` or ``functools.reduce(...)`` runs, only C code references that tensor.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pytest_cka_memory.holders import expressions
from pytest_cka_memory.holders.torch_references import dtype_and_shape_of
from pytest_cka_memory.holders.tree import Paths, Reference
from pytest_cka_memory.meters.autograd_nodes import is_node

_GROWS = (
    "the autograd graph of `{}` reaches back through several batches, because each of them "
    "computes it from its last value{}: {}"
)
_OF_C_CODE = (
    "C or C++ code, such as a running sum(), references a tensor{} whose autograd graph reaches "
    "back through several batches: {}"
)
_NUMBER = "add loss.item() to it instead of the loss"
_NODES = (
    "the autograd graph of {} has nodes of every batch, which take memory of the host that no "
    "tensor has: {}"
)
_LOSSES = (
    f"{_NUMBER}; if backward() is called on the sum, call it on the loss of each batch instead"
)
_EACH_STATE = "compute it from a detach() of its last value, or in torch.no_grad()"
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
    made_by = made(path[head - 1].value)
    root = path[0].root
    name = expressions.expression_of(path[:head]).removesuffix("" if root is None else root.suffix)
    if not _is_number(path[head - 1].value):
        what = _STATE.format(name)
    elif _is_number(path[-1].value):
        what = _NUMBER
    else:  # backward() frees activations, so perhaps it is called on the sum
        what = _LOSSES
    return _GROWS.format(name, made_by, what)


def head_in_c_code(path: Sequence[Reference]) -> Any:
    """Return the tensor through whose graph `path` leads from C code to its end, otherwise None.

    C code may reference it as one of the arguments of a call, which are a tuple.
    """
    head = next((number for number, step in enumerate(path) if is_node(type(step.value))), 0) - 1
    if head < 0 or any(type(step.value) not in (tuple, list) for step in path[:head]):
        return None
    return path[head].value if _is_of_graph(path, path[head]) else None


def advice_of_c_code(
    path: Sequence[Reference], batches: int | None, made: Callable[[Any], str]
) -> str | None:
    """Return what to do if such a graph holds storages of several batches, otherwise None."""
    head = head_in_c_code(path)
    if (batches or 0) < 2 or head is None:
        return None
    made_by = made(head)
    what = _LOSSES if _is_number(head) else _EACH_STATE
    return _OF_C_CODE.format(made_by and f", made{made_by},", what)


def advice_of_nodes(tensor: Any, name: str) -> str:
    """Return what to do about a tensor whose graph has nodes of every batch."""
    return _NODES.format(name, _NUMBER if _is_number(tensor) else _EACH_STATE)


def _is_number(value: Any) -> bool:
    """Whether a tensor has one element."""
    _, shape = dtype_and_shape_of(value)
    return shape is not None and math.prod(shape) == 1


def _is_of_graph(path: Sequence[Reference], head: Reference) -> bool:
    """Whether a path ends at a tensor, or leads from it to its end through nodes alone."""
    numbers = [number for number, step in enumerate(path) if step.value is head.value]
    if not numbers or dtype_and_shape_of(head.value)[0] is None:
        return False
    return all(is_node(type(step.value)) for step in path[numbers[0] + 1 : -1])
