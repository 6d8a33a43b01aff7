"""The forward of a class is wrapped while a trial runs, also where sharding has made another."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pytest_cka_memory.repair.changes.forwards import forward_of_class


class Layer(nn.Module):
    """Gives each subclass a forward of its own, as the layers of transformers do."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.forward

        @functools.wraps(forward)
        def own(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        cls.forward = own


def sharded(kind: type) -> nn.Module:
    """Return a module of the class that ``fully_shard`` makes of a class."""
    module: nn.Module = kind()
    module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    return module


def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Double what a forward returns."""
    return lambda module, x: 2 * forward(module, x)


def test_classes_of_sharded_modules_are_wrapped_once() -> None:
    """Whether they were made before the block or in it; after it they are what they were."""

    class Same(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    before = sharded(Same)
    one = torch.ones(1)
    with forward_of_class(Same, doubled):
        inside = sharded(Same)
        assert [module(one).item() for module in (Same(), before, inside)] == [2, 2, 2]
    assert [module(one).item() for module in (Same(), before, inside)] == [1, 1, 1]
    with forward_of_class(Same, doubled):
        assert [module(one).item() for module in (Same(), before, inside)] == [2, 2, 2]
