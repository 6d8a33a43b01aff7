"""The list, dict, deque or set that keeps the storages of a group, one entry after another."""

import types
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from pytest_cka_memory.holders import expressions
from pytest_cka_memory.holders.tree import Paths, Reference

_GROWING = (list, dict, deque, set)
ReferencePath = Sequence[Reference]


class Container(NamedTuple):
    """A container that can grow, and how many of its entries lead to the storages of a group."""

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
                return f"`{variable}`, a variable of the closure `{_text(self.path[:-3])}`,"
        return f"`{_text(self.path)}`"

    @property
    def is_a_local(self) -> bool:
        """Whether it is itself a variable, of a function that runs."""
        return len(self.path) == 1


def shared_container(paths: Paths) -> Container | None:
    """Return the container in which the paths of a group part; None if they do not part in one."""
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
    before = list(takewhile(lambda step: not issubclass(type(step.value), kind), paths.first))
    while before and not _is_growing(before[-1], before[:-1]):
        before.pop()
    if not before or len(before) == len(paths.first):
        return None
    return Container(before, paths.objects_of(kind))


def _is_growing(step: Reference, before: ReferencePath) -> bool:
    """Whether an object is a container of the user's: not a part of another object of torch."""
    import torch

    if not issubclass(type(step.value), _GROWING):
        return False
    if any(issubclass(type(each.value), torch.optim.Optimizer) for each in before):
        return False
    parent = step.parent
    if parent is None or not issubclass(type(step.value), dict):
        return True
    # Where Python keeps attributes in a dict, that comes between.
    owners = [parent, *(each.parent for each in before if each.value is parent)]
    modules = [it for it in owners if issubclass(type(it), torch.nn.Module)]
    if any(step.value is vars(module).get(name) for module in modules for name in _OF_MODULES):
        return False
    return not expressions.is_own_dict(step.value, parent)


_OF_MODULES = ("_parameters", "_buffers", "_modules")


def _text(path: ReferencePath) -> str:
    """Return a path as an expression, without the function whose variable it begins with."""
    root: Any = path[0].root
    return expressions.expression_of(path).removesuffix(root.suffix)
