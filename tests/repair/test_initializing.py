"""Large parameters are left as they are allocated where nothing computes with their values."""

import pytest
import torch
from torch import nn

from pytest_cka_memory.repair.smaller import without_random_values

LARGE = 300  # squared, more elements than a parameter has that is initialized


class Net(nn.Module):
    """A layer whose weight a test initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(LARGE, LARGE))


def own_distribution(weight: torch.Tensor) -> None:
    """As timm and others make a truncated normal distribution."""
    weight.uniform_(-1, 1)
    weight.erfinv_()
    weight.mul_(0.02)
    weight.add_(1.0)
    weight.clamp_(min=-2, max=2)


@pytest.mark.parametrize(
    "initialize",
    [
        lambda net: nn.init.normal_(net.weight),
        lambda net: nn.init.kaiming_uniform_(net.weight),
        lambda net: nn.init.trunc_normal_(net.weight),
        lambda net: nn.init.orthogonal_(net.weight),
        lambda net: net.weight.data.normal_(),
        lambda net: net.weight.data[:250].uniform_(),
        lambda net: own_distribution(net.weight),
    ],
    ids=["normal", "kaiming", "truncated", "orthogonal", "data", "part", "own"],
)
@torch.no_grad()
def test_parameters_are_left_as_they_are(initialize) -> None:  # type: ignore[no-untyped-def]
    """However a library draws them; and the same call draws once the block has ended."""
    net = Net()
    with without_random_values():
        net = Net()
        initialize(net)
        assert not net.weight.any()
    initialize(net)
    assert net.weight.any()


@torch.no_grad()
def test_other_tensors_get_their_values() -> None:
    """Batches, small parameters, and a tensor at the address of a parameter that was freed."""
    with without_random_values():
        net = Net()
        nn.init.normal_(net.weight)
        assert torch.zeros(LARGE, LARGE).normal_().any()
        assert torch.ones(LARGE, LARGE).mul_(2).sum() == 2 * LARGE**2
        assert nn.Linear(8, 8).weight.any()
        address = net.weight.data_ptr()
        del net
        again = [torch.zeros(LARGE, LARGE) for _ in range(8)]
        same = [each for each in again if each.data_ptr() == address]
        assert all(each.uniform_().any() for each in [*same, *again])


@torch.no_grad()
def test_loop_that_draws_until_it_accepts_ends() -> None:
    """A parameter whose values are drawn again and again is not left out for ever."""
    with without_random_values():
        net = Net()
        times = 0
        while not net.weight.any():
            net.weight.normal_()
            times += 1
    assert 1 < times < 10


def test_function_that_was_kept_in_the_block_draws_after_it() -> None:
    """A library that is imported in a step may keep the functions that it finds then."""
    with without_random_values():
        kept = nn.init.trunc_normal_, torch.Tensor.normal_
    for function in kept:
        net = Net()
        with torch.no_grad():
            function(net.weight)
        assert net.weight.any()
    assert "normal_" not in vars(torch.Tensor)


def test_compiled_function_is_traced() -> None:
    """torch.compile calls the replaced methods with tensors that have no storage."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x.clone().mul_(2).add_(1)

    with without_random_values():
        nn.init.normal_(Net().weight)
        compiled = torch.compile(double, backend="eager", fullgraph=True)
        assert compiled(torch.ones(LARGE, LARGE)).sum() == 3 * LARGE**2
