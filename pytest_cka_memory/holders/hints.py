"""Advice on how to free a retained tensor, chosen by what references it.

The rules look at the objects on the path to the tensor, not at their names: an attribute that the
user has called ``grad`` or ``my_hooks`` is no gradient and no hook. A stored exception has advice
only for its keeper: the user's own code, a package, or a plugin of pytest.
"""

import functools
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from types import TracebackType
from typing import Any

import torch

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.core.places import OWN_FOLDERS, is_of_package
from pytest_cka_memory.holders import Paths, Reference, ReferencePath, owners, references
from pytest_cka_memory.holders.expressions import local_expression_of
from pytest_cka_memory.holders.growing import container_before, shared_container
from pytest_cka_memory.holders.tensors import (
    class_module,
    has_one_element,
    is_gradient,
    is_hooks,
    is_part_of_its_storage,
)
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.objects import grad_fn_of, is_node
from pytest_cka_memory.units import counted

_NOT_KEEPERS = frozenset(
    {"_pytest", "pytest", "pluggy", "torch", "numpy", "pytest_cka_memory", "emulated_cuda"}
)


def keeper_of(path: ReferencePath) -> str | None:
    """Return who stores the exception on a path of references; None if it is the user's own code.

    That is a package that was installed, by a global or an object of one of its classes, or an
    attribute of a test item, which only plugins of pytest set. What the frames of the traceback
    reference does not count, because it did not store the exception.
    """
    root = path[0].root
    modules = [] if root is None else [root.prefix.rstrip(".")]
    storing = _before_exception(path)
    modules += [class_module(type(reference.value)) for reference in storing]
    for name in modules:
        package = name.partition(".")[0]
        if package not in _NOT_KEEPERS and _is_installed(package):
            return f"the package {package}"
    for number, reference in enumerate(storing):
        if _is_test_item(reference.value):
            attribute = _attribute(reference.value, path[number + 1 :])
            return f"a plugin that sets {attribute} on the test item"
    return None


def _before_exception(path: ReferencePath) -> ReferencePath:
    """Return the references before the first exception or traceback; all if there is none."""
    kinds = (BaseException, TracebackType)
    return list(takewhile(lambda reference: not issubclass(type(reference.value), kinds), path))


def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    return isinstance(file, str) and is_of_package(file)


def _is_test_item(value: Any) -> bool:
    pytest = sys.modules.get("pytest")  # not imported outside of its sessions
    return pytest is not None and issubclass(type(value), pytest.Item)


def _attribute(item: Any, path: ReferencePath) -> str:
    """Return the attribute of `item` with which the rest of the path begins."""
    values = {id(reference.value) for reference in path[:2]}  # the first may be its __dict__
    names = [name for name, value in vars(item).items() if id(value) in values]
    return f"the attribute `{names[0]}`" if names else "an attribute"


# A list of losses that are detached still grows with every batch, so only item() is advised.
_LOSS = "keep loss.item() instead of the tensor, which keeps its autograd graph alive"
# With no_grad() alone, the losses themselves would still be kept.
_LOSS_OF_SAVED = f"{_LOSS}; if no backward pass is needed, also compute it in torch.no_grad()"
_LOSS_PART = (
    "keep loss.item() instead of the tensor, which keeps its autograd graph alive and uses "
    "only part of its storage"
)
_SAVED = (
    "the autograd graph of another tensor keeps this one; keep the other tensor's detach() "
    "instead, which has no graph, or a number computed from it, such as its mean().item()"
)
_ATTACHED_PART = (
    "keep detach().clone() instead of the tensor, which keeps its autograd graph alive and "
    "uses only part of its storage"
)
_GRAPH = (
    "keep what you need of the autograd node, such as its name(), instead of the node (a "
    "grad_fn, or the ctx of a Function), which keeps tensors alive"
)
_LOGGED = (
    "log a number or a string, such as loss.item() or f'{x}'; a log record keeps its "
    "arguments alive, and pytest's handlers keep each record until the test ends"
)
_PART = (
    "keep a clone() instead of the tensor, which uses only part of its storage but keeps "
    "all of it alive, as views and the results of some losses do"
)
_NUMBER = "keep the number, tensor.item(), instead of the tensor, which has one element"
_NUMBER_PART = (
    "keep the number, tensor.item(), instead of the tensor, which has one element but keeps a "
    "larger storage alive, as views and the results of some losses do"
)
_HOOK = (
    "a hook was never removed; keep the handle that its registration returns, and call "
    "handle.remove()"
)
_CACHE = (
    "call cache_clear(), or do not cache a function that takes or returns tensors or "
    "modules; a cache keeps arguments (such as `self`) and results alive"
)
_GENERATOR = (
    "exhaust the suspended generator, or close() it; until then it keeps its local variables alive"
)
_COROUTINE = (
    "await the suspended coroutine, or close() it; until then it keeps its local variables alive"
)
_ASYNC = (
    "exhaust the suspended generator, or aclose() it; until then it keeps its local variables alive"
)
_GRADIENT = (
    "call zero_grad() of the optimizer or module, or set .grad = None; until then the "
    "gradient of a parameter stays allocated"
)
_GRADIENT_OF = (
    "set `{}.grad = None` after its last use, or compute the gradient with "
    "torch.autograd.grad(), which sets no .grad, or do not keep the tensor; zero_grad() "
    "frees only gradients of parameters, and this tensor is not a parameter"
)
_OPTIMIZER = (
    "take one step of the optimizer before measuring, because it allocates its state in "
    "its first step; if the measured block makes the optimizer, delete it there"
)
_OLD_OPTIMIZERS = (
    "{0} keeps old optimizers, each with its state and gradients; remove them from {0}"
)
_OPTIMIZERS = (
    "{0} keeps {1}; if the measured block creates them, remove them from {0} before the block "
    "ends; otherwise take a step before measuring, because an optimizer allocates its state in its "
    "first step"
)
_GROWS = "{} grows in every batch; empty it, or limit its length"
_KEEPS = "{} has {} entries that keep these tensors alive; empty it in the block"
# To keep less of each does not stop a container that grows, so these advise only against growth.
_EACH_SAVED = (
    "each of these tensors is saved for the backward pass of a tensor that is kept; instead of "
    "that tensor, keep a number such as its mean().item(); keeping its detach() would free these "
    "tensors, but not that one"
)
_EACH_ATTACHED_PART = (
    "each tensor keeps its autograd graph alive and uses only part of its storage; keeping "
    "detach().clone() instead frees the graph and the unused part of the storage, but not the part "
    "that the tensor uses"
)
_EACH_PART = (
    "each tensor uses only part of its storage but keeps all of it alive, as views and the results "
    "of some losses do; keeping a clone() instead frees the unused part of the storage, but not "
    "the part that the tensor uses"
)
_REMOVE = "remove each tensor from the object that references it; {}"
_FOR_NUMBERS = (_LOSS, _LOSS_OF_SAVED, _LOSS_PART, _NUMBER, _NUMBER_PART)
_OF_EACH = {_SAVED: _EACH_SAVED, _ATTACHED_PART: _EACH_ATTACHED_PART, _PART: _EACH_PART}
_EXCEPTION = (
    "store the text of the exception instead of the exception, which keeps its frames and "
    "their variables alive"
)
_EXCEPTION_OF = (
    "{} stores an exception, which keeps its frames and their variables alive; run without "
    "it (-p no:NAME for a plugin of pytest), and report this to its authors"
)
_SCRIPT = (
    "delete the function that torch.jit has compiled, or call its "
    "_debug_flush_compilation_cache(); until then torch.jit keeps the optimized code with "
    "its constants"
)
_LOCAL = (
    "`{0}` is a local variable of {1}; write `del {0}` in the block, or move the body of "
    "the block into a function"
)
_LOCAL_OBJECT = (
    "`{0}` is a local variable of {1}; if the measured block creates it, write `del {0}` at the "
    "end of the block; otherwise do not store the tensor in it"
)
_SAME_OBJECT = (
    "{} and {} are the same object; if the measured block creates it, remove each of these "
    "references; otherwise do not store the tensor in it"
)
_CONTAINERS = (list, tuple, dict, deque, set, frozenset)

Rule = Callable[[ReferencePath], str | None]
"""Returns the advice if it fits a path from a root to a holder, otherwise None."""


def hint_for(
    allocation: Allocation,
    paths: Paths | None,
    batches: int | None = None,
) -> str | None:
    """Return the advice for storages of one group, which one line made and which are held alike.

    Args:
        allocation: the largest of the storages.
        paths: those to the holders of the storages; None if the search found none.
        batches: in how many batches they were allocated; None if the region has no batches.

    Returns:
        One sentence, without a full stop; None if no rule fits.
    """
    if paths is None:
        return owners.without_object(allocation)
    first = paths.first
    advice = _first(_RAREST, first) or _of_several(paths, batches) or _gradient(first)
    if advice is not None:
        return advice
    if batches is not None:
        # A local that a loop adds to holds the earlier batches, so to delete it would be too late.
        advice = _first((_plain_local, _of_tensor), first)
        if batches > 1 and advice in _OF_EACH:
            return _REMOVE.format(_OF_EACH[advice])
        return advice
    return _first((_local_tensor, _of_tensor, local_object), first)


def of_same_object(names: Sequence[str]) -> str:
    """Return the advice for a tensor in an object that several names lead to."""
    *names, last = names
    return _SAME_OBJECT.format(", ".join(names), last)


def _first(rules: Sequence[Rule], path: ReferencePath) -> str | None:
    """Return the advice of the first rule that fits."""
    advices = (rule(path) for rule in rules)
    return next((advice for advice in advices if advice is not None), None)


def _of_several(paths: Paths, batches: int | None) -> str | None:
    """Return advice that names the container of the user's that keeps optimizers, or that grows."""
    grows = (batches or 0) > 1
    if _has(paths.first, torch.optim.Optimizer):
        keeper = container_before(paths, torch.optim.Optimizer)
        if keeper is None:
            return None
        if grows and keeper.entries > 1:
            return _OLD_OPTIMIZERS.format(keeper.name)
        return _OPTIMIZERS.format(keeper.name, counted(keeper.entries, "optimizer"))
    container = shared_container(paths)
    if container is None or container.entries < 2:
        return None
    own = _of_tensor(paths.first)
    if own in _FOR_NUMBERS:  # a list of numbers may grow
        return None
    holds_them = paths.longest <= len(container.path) + 2
    if not grows and (batches is not None or not holds_them or container.is_a_local):
        return None
    named = (_GROWS if grows else _KEEPS).format(container.name, container.entries)
    if own is None:
        return named
    return f"{named}; {_OF_EACH.get(own, own)}"


def _has(path: ReferencePath, *kinds: type) -> bool:
    return any(issubclass(type(reference.value), kinds) for reference in path)


def _logged(path: ReferencePath) -> str | None:
    return _LOGGED if _has(path, logging.LogRecord) else None


def _hook(path: ReferencePath) -> str | None:
    """Match the dicts in which modules and tensors, and torch itself, keep hooks."""
    first, name = path[0], path[0].text or ""
    if first.root is not None and first.root.prefix.startswith("torch."):
        return _HOOK if name.startswith("_global_") and name.endswith("_hooks") else None
    dicts = [reference for reference in path[1:] if issubclass(type(reference.value), dict)]
    if any(is_hooks(reference.value, reference.parent) for reference in dicts):
        return _HOOK
    modules = [
        reference.value for reference in path if issubclass(type(reference.value), torch.nn.Module)
    ]
    hooks = {id(vars(module).get(name)) for module in modules for name in _names_of_hooks()}
    return _HOOK if any(id(reference.value) in hooks for reference in dicts) else None


@functools.cache
def _names_of_hooks() -> frozenset[str]:
    """Return the names of the attributes in which a module keeps its hooks."""
    return frozenset(name for name in vars(torch.nn.Module()) if name.endswith("_hooks"))


def _exception(path: ReferencePath) -> str | None:
    if not _has(path, types.TracebackType):
        return None
    keeper = keeper_of(path)
    return _EXCEPTION if keeper is None else _EXCEPTION_OF.format(keeper)


def _suspended(path: ReferencePath) -> str | None:
    """Match caches of functions, and code that waits to be continued."""
    if any(_is_own_generator(reference.value) for reference in path):
        return None  # it wraps the user's loader; what that keeps is the user's
    for kind, advice in (
        (functools._lru_cache_wrapper, _CACHE),
        (types.GeneratorType, _GENERATOR),
        (types.CoroutineType, _COROUTINE),
        (types.AsyncGeneratorType, _ASYNC),
    ):
        if _has(path, kind):
            return advice
    return None


def _is_own_generator(value: object) -> bool:
    return type(value) is types.GeneratorType and value.gi_code.co_filename.startswith(OWN_FOLDERS)


def _compiled(path: ReferencePath) -> str | None:
    """Match code that ``torch.compile`` made and stores among the globals of the user's module."""
    is_global = (path[0].text or "").startswith("__compiled_fn_")
    return owners.compiled() if is_global or owners.is_compiled(path) else None


def _packed(path: ReferencePath) -> str | None:
    return references.PACKED_ADVICE if references.leads_through_packed(path) else None


def _optimized(path: ReferencePath) -> str | None:
    return _SCRIPT if path[-1].text == references.SCRIPT_CONSTANT else None


_RAREST: Sequence[Rule] = (_logged, _compiled, _optimized, _packed, _hook, _exception, _suspended)
"""The rules for the rarest holders, which come first: what they match is also in containers, or is
a tensor for which a more common rule would say less."""


def _gradient(path: ReferencePath) -> str | None:

    number = next((n for n, it in enumerate(path) if is_gradient(it.value, it.parent)), None)
    if number is not None:
        if issubclass(type(path[number].parent), torch.nn.Parameter):
            return _GRADIENT
        # Not the gradient is kept, but the graph that has the tensor as an input.
        if number == 0 or any(map(_is_node, path[:number])):
            return _of_tensor(path)
        return _GRADIENT_OF.format(local_expression_of(path[:number]))
    return _OPTIMIZER if _is_state(path) else None


def _is_state(path: ReferencePath) -> bool:
    """Whether a path leads through the state of an optimizer, and not to its parameters."""
    values = [reference.value for reference in path]
    optimizers = [it for it in values if issubclass(type(it), torch.optim.Optimizer)]
    states = {id(vars(it).get("state")) for it in optimizers}
    return any(id(value) in states for value in values)


def _plain_local(path: ReferencePath) -> str | None:
    """Match a tensor that is itself a local variable of the user's code."""
    return _local_tensor(path) if len(path) == 1 else None


def _local_tensor(path: ReferencePath) -> str | None:
    """Match a local tensor, or a tensor that only the autograd graph of a local tensor holds."""
    inside = all(
        issubclass(type(reference.value), torch.Tensor) or _is_node(reference) for reference in path
    )
    name, function = _local(path)
    if not function or not inside or not issubclass(type(path[0].value), torch.Tensor):
        return None
    return _LOCAL.format(name, function)


def local_object(path: ReferencePath) -> str | None:
    """Match a tensor in a local variable that is a list, a module or another object."""
    name, function = _local(path)
    if not function or len(path) == 1:
        return None
    return _LOCAL_OBJECT.format(name, function)


def _local(path: ReferencePath) -> tuple[str, str]:
    """Return the name of the variable in which a path begins, and of its function if it is local.

    Locals of installed code are not the user's to delete.
    """
    root = path[0].root
    if root is None or root.is_library or path[0].text == "self":
        return "", ""
    return path[0].text or "", root.function


def _is_node(reference: Reference) -> bool:
    return is_node(type(reference.value))


def _of_tensor(path: ReferencePath) -> str | None:
    """Return advice that follows from the holder, if that is a tensor, or from its graph."""
    nodes = [number for number, reference in enumerate(path) if _is_node(reference)]
    holder = path[nodes[0] - 1 if nodes else -1].value
    if not issubclass(type(holder), torch.Tensor):
        return _GRAPH if nodes else None
    is_number = has_one_element(holder)
    with torch_private.no_subclass_function():
        is_attached = grad_fn_of(holder) is not None
    is_part = not nodes and is_part_of_its_storage(holder)
    if is_attached and is_number:
        whole = _LOSS_OF_SAVED if nodes and _is_saved(path[nodes[0] :]) else _LOSS
        return _LOSS_PART if is_part else whole
    if nodes:
        return _SAVED
    if is_attached and is_part:
        return _ATTACHED_PART
    if is_number and _is_in_container(path):
        return _NUMBER_PART if is_part else _NUMBER
    return _PART if is_part else None


def _is_saved(in_graph: ReferencePath) -> bool:
    """Whether a graph holds a tensor for a backward pass.

    Such a pass would have released it, unless it was told to retain the graph.
    """
    return any("saved_" in (reference.text or "") for reference in in_graph)


def _is_in_container(path: ReferencePath) -> bool:
    """Whether the holder is an entry of a container, but not a parameter or buffer of a module."""
    near = path[-4:-1]
    return issubclass(type(path[-1].parent), _CONTAINERS) and not _has(near, torch.nn.Module)
