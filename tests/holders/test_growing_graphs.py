"""The tensor whose autograd graph has nodes of every batch, also if torch counts no byte of it."""

from collections.abc import Callable
from typing import Any

import forked_processes
import pytest
import torch
from torch import nn

from pytest_cka_memory.holders.growing import growing_graph
from pytest_cka_memory.meters import torch_private

BATCHES = 6
STATE: dict[str, Any] = {}


def loss_of(model: nn.Module) -> torch.Tensor:
    """Return a loss whose saved tensors a backward pass has freed."""
    loss: torch.Tensor = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    return loss


def found_after(step: Callable[[nn.Module], object]) -> str | None:
    """Return what is found after the last batch of a loop."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    boundaries = []
    for _ in range(BATCHES):
        step(model)
        boundaries.append(torch_private.sequence_number())
    return growing_graph(boundaries)


@pytest.fixture(autouse=True)
def _clean():
    yield
    STATE.clear()


def test_sum_of_losses_after_their_backward_pass_is_named() -> None:
    """Only nodes of C++ grow; the sum is named with the advice for a number."""

    def step(model: nn.Module) -> None:
        STATE["total"] = STATE.get("total", 0) + loss_of(model)

    assert found_after(step) == (
        "the autograd graph of `test_growing_graphs.STATE['total']` keeps nodes of every batch; "
        "they take host memory that is not in tensors; add loss.item() to the sum instead of the "
        "loss"
    )


def test_sum_in_place_in_an_object_is_named() -> None:
    """``self.sum += loss`` changes one tensor, whose graph grows."""

    def step(model: nn.Module) -> None:
        STATE.setdefault("sum", torch.zeros(()))
        STATE["sum"] += loss_of(model)

    assert "`test_growing_graphs.STATE['sum']` keeps nodes of every batch" in str(found_after(step))


def test_state_that_is_no_number_is_to_be_detached() -> None:
    """A state is not a sum of numbers, and its advice is to detach it."""

    def step(model: nn.Module) -> None:
        STATE["h"] = STATE.get("h", torch.zeros(4, 8)) + model(torch.ones(4, 8))

    assert str(found_after(step)).endswith(
        "compute each new value from a detach() of the previous one, or in torch.no_grad()"
    )


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda model: STATE.update(last=loss_of(model)), id="last_loss"),
        pytest.param(
            lambda model: STATE.setdefault("losses", []).append(loss_of(model)), id="list_of_losses"
        ),
        pytest.param(
            lambda model: STATE.update(total=STATE.get("total", 0) + loss_of(model).item()),
            id="numbers",
        ),
        pytest.param(
            lambda model: STATE.update(mean=STATE.get("mean", loss_of(model)).detach() * 0.9),
            id="detached",
        ),
    ],
)
def test_loop_without_a_growing_graph_names_none(step: Callable[[nn.Module], object]) -> None:
    """A graph of one batch is no growth, and a list of losses has a graph for each of them."""
    assert found_after(step) is None


def test_graph_of_an_episode_that_began_later_is_none() -> None:
    """A graph without nodes of the second batch may be dropped soon."""
    batch = iter(range(BATCHES))

    def step(model: nn.Module) -> None:
        loss = loss_of(model)
        STATE["total"] = loss if next(batch) < 3 else STATE["total"] + loss

    assert found_after(step) is None


DEEP = """
import torch
from pytest_cka_memory.holders.growing import growing_graph
from pytest_cka_memory.meters import torch_private

weight, state, boundaries = torch.ones(1, requires_grad=True), torch.ones(1), []
for _ in range(6):
    for _ in range(20_000):
        state = state + weight
    boundaries.append(torch_private.sequence_number())
growing_graph(boundaries)
del state
print("freed")
"""


def test_deep_graph_can_be_freed_after_the_search() -> None:
    """In torch 2.14, to free many nodes in a row that have Python objects overflows the stack."""
    run = forked_processes.run(["python", "-c", DEEP])
    assert run.stdout == "freed\n", run.stderr


def test_custom_functions_and_graphs_that_are_freed_are_no_error() -> None:
    """Nodes of a custom Function have numbers too; one whose graph is gone has none."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    def step(model: nn.Module) -> None:
        STATE["total"] = Double.apply(STATE.get("total", torch.zeros(()))) + loss_of(model)

    assert "STATE['total']" in str(found_after(step))
    freed = Double.apply(torch.ones(1, requires_grad=True)).grad_fn
    assert torch_private.number_of_node(freed) >= -1
