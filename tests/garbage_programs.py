"""Steps of loops that leave garbage in reference cycles, for tests of levels and peaks."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from gc import get_freeze_count  # a fixture replaces that of the module
from typing import Any

import torch
from growth_programs import Cycle
from torch.utils.checkpoint import checkpoint

BATCHES = 16
SIZE = 64 * 1024


class OwnMethod:
    """An object that references its own method."""

    def __init__(self, value: torch.Tensor) -> None:
        self.result = value * 2
        self.me = self.run

    def run(self) -> torch.Tensor:
        return self.result


def own_method(value: torch.Tensor) -> None:
    """Leave a result in an object that references its own method."""
    OwnMethod(value)


def graph(value: torch.Tensor) -> None:
    """Leave a graph, which keeps more in C++ than the cycle references in Python."""
    weight = torch.ones_like(value, requires_grad=True)
    Cycle((weight * value).exp().sum())


def custom_function(value: torch.Tensor) -> None:
    """Leave the context of a custom function, which references a tensor as an attribute."""
    weight = torch.ones_like(value, requires_grad=True)
    Cycle(KeepsInput.apply(weight))


class KeepsInput(torch.autograd.Function):
    """Keeps more than its saved tensors."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value * 3)
        ctx.kept = value * 4
        return value.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * ctx.kept


def reentrant_checkpoint(value: torch.Tensor) -> None:
    """Leave what a reentrant checkpoint keeps for its recomputation."""
    weight = torch.ones_like(value, requires_grad=True)
    Cycle(checkpoint(torch.exp, weight * 2, use_reentrant=True))


def growing_sizes(value: torch.Tensor) -> None:
    """Leave blocks of many sizes, for which an allocator reserves more."""
    growing_sizes.steps = getattr(growing_sizes, "steps", 0) % BATCHES + 1  # type: ignore[attr-defined]
    Cycle(value.new_empty(growing_sizes.steps * SIZE))  # type: ignore[attr-defined]


def collects_itself(value: torch.Tensor) -> None:
    """Leave garbage and collect it in every fifth step."""
    own_method(value)
    collects_itself.steps = getattr(collects_itself, "steps", 0) % BATCHES + 1  # type: ignore[attr-defined]
    if collects_itself.steps % 5 == 0:  # type: ignore[attr-defined]
        gc.collect()


STEPS: tuple[Callable[[torch.Tensor], None], ...] = (
    *(own_method, graph, custom_function, reentrant_checkpoint, growing_sizes, collects_itself),
)


def run(step: Callable[[torch.Tensor], None], values: Iterable[torch.Tensor]) -> None:
    """Run a loop over a step."""
    for value in values:
        step(value)


@contextmanager
def no_automatic_collections(*, always_freezes: bool = False) -> Iterator[None]:
    """Leave garbage uncollected in the block, so that its levels are the same in each run.

    What exists before is frozen, so that collections of the block itself take no time. If the
    imports are frozen already, that is enough, unless all of it must be. Then all of it stays
    frozen until the end of the test's module: to thaw it would thaw the imports too, which makes
    all later collections slow.
    """
    # A fixture has put something in place of this function if it has frozen the imports.
    exclude_all = getattr(gc.get_freeze_count, "exclude_all", None)
    has_imports = getattr(gc.get_freeze_count, "has_imports", None)
    freezes = always_freezes or not (get_freeze_count() if has_imports is None else has_imports)
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if freezes and exclude_all is None:
            gc.unfreeze()
        gc.collect()
        if freezes and exclude_all is not None:
            exclude_all()
