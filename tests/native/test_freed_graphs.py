"""What a graph has kept for a backward pass that never came: it is freed with a tensor."""

from typing import Any

import torch

from pytest_cka_memory.core.allocations import Freed
from pytest_cka_memory.meters.blocks.counter import Counter, RegionCounter


class Doubling(torch.autograd.Function):
    """A function in Python: to free its part of a graph, torch takes the interpreter's lock."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.factors = torch.full((700,), 2)
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def freed_in(region: RegionCounter) -> set[tuple[int, int, Freed]]:
    """Return bytes, number of blocks and way of freeing of what a region had at its peak."""
    groups = [group for group in region.at_peak() if not group.before_region]
    return {(group.bytes, group.count, group.freed) for group in groups}


def test_what_a_graph_kept_is_apart_from_the_tensor_that_had_it(counter: Counter) -> None:
    """When a tensor is freed, what only its graph had is freed with the graph, and counts once."""
    values = torch.ones(1000, requires_grad=True)
    region = counter.open()
    result = values.exp().sum()
    del result
    found = freed_in(region)
    region.close()
    assert found == {(4000, 1, Freed.WITH_GRAPH), (4, 1, Freed.NO)}


def test_graph_with_functions_in_python_is_freed_as_a_whole(counter: Counter) -> None:
    """What is beyond a function in Python is of the graph too, as is what that function has."""
    values = torch.ones(1000, requires_grad=True)
    region = counter.open()
    hidden = Doubling.apply(values.exp()).narrow(0, 0, 500).exp()
    result = hidden.sum()
    del hidden, result
    found = freed_in(region)
    region.close()
    with_graph = {(size, count) for size, count, freed in found if freed is Freed.WITH_GRAPH}
    assert with_graph == {(4000, 1), (5600, 1), (2000, 1)}
