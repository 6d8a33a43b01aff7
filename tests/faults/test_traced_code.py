"""``torch.jit.trace`` works in a region as outside of it, and its tensors are counted."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.storage_meter import StorageMeter

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("imports_excluded_from_search"),
]


def ledger_probe() -> MemoryProbe:
    """Return a probe with a ledger: counting in the allocator needs no mode, which traces break."""
    return MemoryProbe(meter=StorageMeter())


class Flat(nn.Module):
    """A module that computes with the sizes of its input, which a trace records as tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] // 1, -1) * 2


@pytest.fixture
def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Flat(), nn.Linear(4 * 6 * 6, 3))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


@pytest.fixture
def earlier_trace() -> Callable[..., Any]:
    """Look up the function before the region, as ``from torch.jit import trace`` does."""
    found: Callable[..., Any] = torch.jit.trace
    return found


def graph(traced: Any) -> str:
    """Return the operators of a trace without generated names."""
    return re.sub(r"__torch__\S*", "", str(traced.inlined_graph))


def trace_module(network: nn.Module, images: torch.Tensor) -> Any:
    return torch.jit.trace_module(network, {"forward": images})


@pytest.mark.parametrize("trace", [torch.jit.trace, trace_module], ids=["trace", "trace_module"])
def test_trace_in_a_region_is_the_same_as_outside(
    network: nn.Module, images: torch.Tensor, trace: Callable[..., Any]
) -> None:
    """In a region torch's tracer is wrapped to suspend the dispatch
    mode; the trace stays the same.
    """
    plain = trace(network, images)
    name = trace.__name__
    with ledger_probe().measure():
        call = torch.jit.trace if name == "trace" else trace
        inside = call(network, images)
    assert graph(inside) == graph(plain)
    more = torch.randn(5, 3, 8, 8)
    assert torch.equal(inside(more), network(more))


def test_traced_code_runs_in_a_region_and_is_counted(
    network: nn.Module, images: torch.Tensor
) -> None:
    """While code is traced, sizes reach operators as numbers
    instead of tensors, without an error.
    """
    traced = torch.jit.trace(network, images)
    expected = network(images)
    with ledger_probe().measure() as region:
        kept = traced(images).detach()
    assert torch.equal(kept, expected)
    assert region.retained_bytes == kept.nbytes == 24


def test_tracer_looked_up_before_the_region_can_compute_with_sizes(
    images: torch.Tensor, earlier_trace: Callable[..., Any]
) -> None:
    """A tracer that was looked up earlier leaves the dispatch mode
    on, and operators get numbers.
    """
    with ledger_probe().measure():
        traced = earlier_trace(Flat(), images)
        assert torch.equal(traced(images), Flat()(images))


def test_wrong_operator_call_in_a_region_raises_the_error_of_torch(images: torch.Tensor) -> None:
    """Only numbers in place of tensors are corrected, so other wrong
    arguments raise torch's error.
    """
    with (
        ledger_probe().measure(),
        pytest.raises(RuntimeError, match=r"shape .* is invalid for input"),
    ):
        images.reshape(7)


def test_tracing_retains_nothing_of_the_network(images: torch.Tensor) -> None:
    """Tracing leaves a few bytes of torch's own; none of the network's 2,348 bytes is retained."""

    def build_and_trace() -> None:
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Flat(), nn.Linear(4 * 6 * 6, 3))
        torch.jit.trace(network, images)

    assert ledger_probe().run(build_and_trace, warmup=1).retained_bytes < 100


def test_region_restores_the_trace_functions() -> None:
    """After a region, torch's trace functions are the same objects as before it."""
    before = torch.jit.trace, torch.jit.trace_module
    with ledger_probe().measure():
        assert torch.jit.trace is not before[0]
    assert (torch.jit.trace, torch.jit.trace_module) == before


def test_dispatch_mode_of_the_user_sees_traced_operators(images: torch.Tensor) -> None:
    """The meter suspends its mode only if it is the innermost, so a user's mode sees operators."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with ledger_probe().measure(), Mode():
        torch.jit.trace(lambda x: x + x, images, check_trace=False)
    assert torch.ops.aten.add.Tensor in seen
