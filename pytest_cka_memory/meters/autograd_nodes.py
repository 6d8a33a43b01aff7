"""Autograd nodes: what is one, and which one has computed a tensor."""

import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def mro(kind: type) -> tuple[type, ...]:
    """Return a class and its bases, even if its metaclass overrides ``__mro__``."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(kind)
    return found


def is_node(kind: type) -> bool:
    """Whether a type is that of an autograd node."""
    found = (type.__dict__["__dict__"].__get__(cls).get("next_functions") for cls in mro(kind))
    return any(type(item) is types.GetSetDescriptorType for item in found)


def grad_fn_of(tensor: "torch.Tensor") -> Any:
    """Return the autograd node that computed a tensor; None if it has none or cannot be asked."""
    from pytest_cka_memory.meters import torch_private

    with torch_private.no_subclass_function(), torch_private.no_dispatch():  # as in gradient_of
        try:
            return tensor.grad_fn
        except RuntimeError:  # a view whose base was modified in a way that autograd rejects
            return None
