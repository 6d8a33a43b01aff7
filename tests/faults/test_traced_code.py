"""``torch.jit.trace`` in a region: traced as outside of it, run as outside of it, and counted."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cka_memory import MemoryProbe

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Flat(nn.Module):
    """Computes with the sizes of its input, which a trace keeps as tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] // 1, -1) * 2


@pytest.fixture
def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Flat(), nn.Linear(4 * 6 * 6, 3))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


@pytest.fixture
def trace_of_before() -> Callable[..., Any]:
    """As ``from torch.jit import trace`` at the head of a file."""
    found: Callable[..., Any] = torch.jit.trace
    return found


def graph(traced: Any) -> str:
    """Its operators, without names that are made anew each time."""
    return re.sub(r"__torch__\S*", "", str(traced.inlined_graph))


def trace_module(network: nn.Module, images: torch.Tensor) -> Any:
    return torch.jit.trace_module(network, {"forward": images})


@pytest.mark.parametrize("trace", [torch.jit.trace, trace_module], ids=["trace", "trace_module"])
def test_the_trace_is_that_of_outside(
    network: nn.Module, images: torch.Tensor, trace: Callable[..., Any]
) -> None:
    """Looked up when called: in a region it is another function, which steps aside."""
    plain = trace(network, images)
    name = trace.__name__
    with MemoryProbe("cpu").measure():
        call = torch.jit.trace if name == "trace" else trace
        inside = call(network, images)
    assert graph(inside) == graph(plain)
    more = torch.randn(5, 3, 8, 8)
    assert torch.equal(inside(more), network(more))


def test_traced_code_runs_in_a_region(network: nn.Module, images: torch.Tensor) -> None:
    """Sizes that come as numbers where tensors are wanted are no error."""
    traced = torch.jit.trace(network, images)
    expected = network(images)
    with MemoryProbe("cpu").measure() as region:
        kept = traced(images).detach()
    assert torch.equal(kept, expected)
    assert region.retained_bytes == kept.nbytes == 24


def test_a_tracer_found_before_the_region_can_compute_with_sizes(
    images: torch.Tensor, trace_of_before: Callable[..., Any]
) -> None:
    """Our mode cannot be put aside for it, and gets numbers where operators want tensors."""
    with MemoryProbe("cpu").measure():
        traced = trace_of_before(Flat(), images)
        assert torch.equal(traced(images), Flat()(images))


def test_a_mistake_in_a_region_stays_the_same_mistake(images: torch.Tensor) -> None:
    """Only numbers in the place of tensors are made good."""
    with (
        MemoryProbe("cpu").measure(),
        pytest.raises(RuntimeError, match=r"shape .* is invalid for input"),
    ):
        images.reshape(7)


def test_tracing_keeps_nothing_of_the_network(images: torch.Tensor) -> None:
    """Only a few bytes that torch itself keeps of every trace; of the network's 2,348, none."""

    def build_and_trace() -> None:
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Flat(), nn.Linear(4 * 6 * 6, 3))
        torch.jit.trace(network, images)

    assert MemoryProbe("cpu").run(build_and_trace, warmup=1).retained_bytes < 100


def test_torchs_functions_are_back_after_the_region() -> None:
    """And so is whatever else was there before."""
    before = torch.jit.trace, torch.jit.trace_module
    with MemoryProbe("cpu").measure():
        assert torch.jit.trace is not before[0]
    assert (torch.jit.trace, torch.jit.trace_module) == before


def test_a_mode_of_the_users_own_sees_what_it_saw(images: torch.Tensor) -> None:
    """Ours steps aside only where it is the innermost."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with MemoryProbe("cpu").measure(), Mode():
        torch.jit.trace(lambda x: x + x, images, check_trace=False)
    assert torch.ops.aten.add.Tensor in seen
