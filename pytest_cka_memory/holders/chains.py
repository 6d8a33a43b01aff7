"""Write paths of references as chains of objects: as text and as links of a picture.

The text is for objects that no name leads to. A loop of references through C++ is written as
``Parameter (5,).grad.grad_fn -> AddBackward0 -> … -> AccumulateGrad -> the same Parameter``; it has
advice on how to break it.

Links are plain text, too, one for each object that users know. They are made only if a picture was
asked for.
"""

import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pytest_cka_memory.core.retention import Link
from pytest_cka_memory.holders import Reference, tensors
from pytest_cka_memory.holders.expressions import is_own_dict, shortened, text_of
from pytest_cka_memory.holders.tensors import (
    class_name,
    dtype_and_shape_of,
    is_hooks,
    label,
    module_name_of,
)
from pytest_cka_memory.holders.unreached import Unreached
from pytest_cka_memory.meters import torch_keepers
from pytest_cka_memory.meters.objects import is_node

_NAMES = ("_modules", "_parameters", "_buffers")
_OF_MODULES = {text for name in _NAMES for text in (f"['{name}']", f".{name}")}
"""References to the dicts of a module, which users do not write. An object refers to them itself,
not its dict, where Python keeps attributes in the object (from 3.13 on)."""
_MOST_LINKS = 12
"""Links of a path; of a longer one, the first and the last."""
_MOST_CHARACTERS = 120
_OF_CPP = "C or C++ code"
_PARTS = (dict, OrderedDict, list, tuple, set, frozenset, deque, types.CellType, types.MethodType)
"""Types whose objects are a part of the text about others, and have no name of their own."""
CHECKPOINT_MODULE = "torch.utils.checkpoint"
_MOST_NODES = 3
"""Nodes of a graph in a row that are all written; of more, the first and the last."""

_CREATE_GRAPH = (
    "set .grad to None after its last use (zero_grad() does so), or use "
    "torch.autograd.grad(..., create_graph=True), which sets no .grad; after "
    "backward(create_graph=True), a parameter and its gradient, whose graph uses the "
    "parameter, keep each other alive"
)
_PACKED = (
    "let the pack hook of saved_tensors_hooks return x.detach() or x.clone(); the saved "
    "tensor itself references the graph that it is saved in"
)
_SAVED_VIEW = (
    "save the output itself in the autograd Function, and make the view in backward(); a "
    "view of the output references the graph that it is saved in"
)
_CONTEXT = (
    "use ctx.save_for_backward(output) instead of an attribute of ctx; the attribute keeps the "
    "output alive, the output keeps its graph, and the graph keeps ctx"
)
_HOOK = (
    "remove the hook with handle.remove(), or let it use only its arguments, or a "
    "weakref.ref to the tensor; the hook references a tensor that references the hook's "
    "own graph"
)
_ACCUMULATOR = (
    "do not store the AccumulateGrad node of a parameter in an attribute of that parameter, or "
    "delete the attribute after the last use of the parameter; the parameter and the node keep "
    "each other alive"
)
_FLAT = (
    "use fully_shard() instead of FSDP; a module keeps a view of FSDP's flat parameter, "
    "the graph of the view keeps the flat parameter, and the flat parameter keeps its "
    "modules"
)
_ATTRIBUTE = (
    "store tensor.detach() in the object instead of the tensor, or delete the attribute after its "
    "last use; the graph of the tensor references the object that keeps the tensor"
)
CHECKPOINT_ADVICE = (
    "call backward() or delete the result, because torch.utils.checkpoint keeps the inputs and the "
    "state of the random number generator until then; if the checkpointed function references its "
    "own result, remove that reference"
)
_ANY = (
    "delete one reference of the loop when it is no longer needed, or make it weak with "
    "weakref.ref; the garbage collector never frees the loop, because it does not see the "
    "references that C++ objects in it hold"
)


def loop_text(loop: Sequence[Reference]) -> str:
    """Return a loop as text; it begins at a tensor if there is one.

    Args:
        loop: the references from an object back to itself, as :class:`.unreached.Unreached` has it.
    """
    turned = _turned(loop)
    stations = list(_stations(turned))
    return shortened(" -> ".join([*stations[:-1], f"the same {class_name(type(turned[0].value))}"]))


def loop_advice(loop: Sequence[Reference]) -> str:
    """Return how to break a loop.

    Several rules may fit one loop; the first decides.
    """
    values = [reference.value for reference in loop]
    if any(_is_flat(reference.value) for reference in loop):
        return _FLAT
    if any(_is_of_hooks(reference) for reference in loop):
        return _HOOK
    if any(module_name_of(value) == CHECKPOINT_MODULE for value in values):
        return CHECKPOINT_ADVICE
    for number, reference in enumerate(loop[1:], 1):
        text, following = reference.text or "", loop[number % (len(loop) - 1) + 1]
        if is_node(type(reference.parent)) and following.text == "._base":
            return _SAVED_VIEW
        if text == ".grad":
            return _CREATE_GRAPH
        if is_node(type(reference.parent)) and following.text == ".grad_fn" and _is_saved(text):
            return _PACKED
    if any(class_name(type(value)) == "AccumulateGrad" for value in values) and not any(
        reference.text == ".grad_fn" for reference in loop
    ):
        return _ACCUMULATOR
    if any(_is_saved(reference.text or "") for reference in loop):
        return _PACKED
    if any(is_node(type(reference.parent)) and reference.text is None for reference in loop[1:]):
        return _CONTEXT
    return _ATTRIBUTE if any(reference.text == ".grad_fn" for reference in loop) else _ANY


def path_text(path: Sequence[Reference]) -> str:
    """Return a path as text whose first object has no name in the program."""
    return shortened(" -> ".join(_stations(path)))


def _is_flat(value: Any) -> bool:

    # FlatParameter has a metaclass, but its instances are plain parameters with this attribute.
    return type(value) is torch.nn.Parameter and "_is_flat_param" in vars(value)


def _is_saved(text: str) -> bool:

    name = torch_keepers.unpacked_name(text.removeprefix("."))
    return name.startswith(("_saved_", "saved_tensors"))


def _is_of_hooks(reference: Reference) -> bool:
    return issubclass(type(reference.value), dict) and is_hooks(reference.value, reference.parent)


def _turned(loop: Sequence[Reference]) -> list[Reference]:
    """Return the same loop from a tensor, if it has one; a parameter is preferred."""
    ring = list(loop[1:])  # a loop's last reference leads to its first object
    tensors = [
        n for n, reference in enumerate(ring) if dtype_and_shape_of(reference.value)[0] is not None
    ]
    named = [n for n in tensors if class_name(type(ring[n].value)) == "Parameter"]
    start = next(iter([*named, *tensors]), len(ring) - 1)
    return [Reference(ring[start].value, None), *ring[start + 1 :], *ring[: start + 1]]


def _stations(path: Sequence[Reference]) -> Iterator[str]:
    """Yield the objects of a path that have a name, with the references that lead onward."""
    text, nodes = label(path[0].value), 0
    number = 1
    while number < len(path):
        reference = path[number]
        kind = type(reference.value)
        number += 1
        if is_node(kind) and is_node(type(reference.parent)):
            following = path[number] if number < len(path) else None
            is_inner = following is not None and is_node(type(following.value))
            nodes += 1
            if nodes < _MOST_NODES or not is_inner:
                yield text
                text = label(reference.value)
            elif nodes == _MOST_NODES:
                yield text
                text = "…"
            continue
        nodes = 0
        if (
            type(reference.parent) is types.FunctionType
            and reference.value is reference.parent.__closure__
        ):
            yield text
            number, text = _closure(path, number)
        elif reference.text == ".grad" or kind in _PARTS:
            text += reference.text or _part(reference)
        else:
            yield text + (
                "" if reference.text == ".variable" else reference.text or _part(reference)
            )
            text = label(reference.value)
    yield text


def _closure(path: Sequence[Reference], number: int) -> tuple[int, str]:
    """Return where a path goes on after a closure, and what leads there."""
    function = path[number - 1].parent
    cells = [id(cell) for cell in function.__closure__]
    if number + 1 >= len(path) or id(path[number].value) not in cells:
        return number, "closure"
    name = function.__code__.co_freevars[cells.index(id(path[number].value))]
    return number + 1, f"closure variable {name}"


def _part(reference: Reference) -> str:
    if type(reference.parent) is types.CellType:
        return ""
    text = text_of(reference.parent, reference.value)
    return "" if text.startswith(" -> ") else text


def links_of_path(path: Sequence[Reference]) -> tuple[Link, ...]:
    """Return the links from a root to the holder at the end of `path`."""
    first = path[0]
    assert first.root is not None, "a path starts at a root"
    start = Link(str(first.text), tensors.label(first.value))
    return _bounded([Link("", first.root.label), start, *_following(path)])


def links_of_unreached(unreached: Unreached) -> tuple[Link, ...]:
    """Return the links from C or C++ code to a holder, or around a loop and from there to it."""
    first = unreached.path[0]
    if not unreached.loop:
        start = Link("references", tensors.label(first.value))
        return _bounded([Link("", _OF_CPP), start, *_following(unreached.path)])
    # A loop begins and ends with the same object; the path begins at any object of it.
    ring = list(unreached.loop[1:])
    at = next(number for number, reference in enumerate(ring) if reference.value is first.value)
    turned = [Reference(first.value, None), *ring[at + 1 :], *ring[: at + 1]]
    around = list(_following(turned))
    back = Link(around[-1].reference, f"the same {around[-1].object}")
    return _bounded(
        [Link("", tensors.label(first.value)), *around[:-1], back, *_following(unreached.path)]
    )


def _following(path: Sequence[Reference]) -> Iterator[Link]:
    """Yield a link for each object after the first, except dicts that users do not write."""
    before = ""
    for number, following in enumerate(path[1:], 1):
        text = following.text or text_of(following.parent, following.value)
        is_last = number == len(path) - 1
        if not is_last and (text in _OF_MODULES or is_own_dict(following.value, following.parent)):
            before += text
            continue
        reference = shortened(before + text).removeprefix(" -> ")
        yield Link(reference, tensors.label(following.value))
        before = ""


def _bounded(path: Sequence[Link]) -> tuple[Link, ...]:
    """Return a path without its middle if it is long, and with texts of a bounded length."""
    left = len(path) - _MOST_LINKS
    if left > 0:
        half = _MOST_LINKS // 2
        path = [*path[:half], Link("", f"… {left} more …"), *path[half + left :]]
    return tuple(Link(_cut(link.reference), _cut(link.object)) for link in path)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
