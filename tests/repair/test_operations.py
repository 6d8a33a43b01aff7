"""What checkpoints compute again, counted by one run for all choices of modules."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import small_models
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pytest_cka_memory.repair.changes import offered
from pytest_cka_memory.repair.changes.checkpointing import Selection, change_for
from pytest_cka_memory.repair.observation import observing
from pytest_cka_memory.repair.search import Search
from pytest_cka_memory.repair.trials import Figures, Trial, flops_of


class Nested(nn.Module):
    """A module that contains another of its class."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.inner = Nested(depth - 1) if depth else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.layer(x).tanh())


def train_nested() -> None:
    """Train modules that contain others of their class."""
    model = nn.Sequential(Nested(1), Nested(1))
    model(torch.ones(64, 64)).square().mean().backward()


def figures(step: partial[object]) -> Figures:
    """Run a step; its memory does not matter."""
    step()
    return Figures(100, None)


@pytest.mark.parametrize(
    ("step", "kind", "runs"),
    [
        (partial(small_models.train, factors=(8, 1, 4, 2), steps=2), small_models.Block, 1),
        (partial(train_nested), Nested, 4),
    ],
    ids=["blocks", "nested"],
)
def test_operations_of_each_choice_are_those_of_its_own_run(
    step: partial[object], kind: type, runs: int
) -> None:
    """One run is enough for all choices, unless one module's checkpoint is inside another's."""
    with observing() as observed:
        step()
    changes, _ = offered(observed)
    (every,) = (c for c in changes if c.name == f"checkpoint every {kind.__name__}")
    assert isinstance(every.part, Selection)
    choices = [None, (0,), (1, 3), (0, 1, 2)]
    wanted = [change_for(replace(every.part, numbers=some)) for some in choices]
    run = partial(figures, step)

    lines: list[str] = []
    search = Search(run, lambda error: False, progress=lines.append)
    base = flops_of((), run)
    assert base
    search.repairs.as_it_is = Trial((), run())
    search.repairs.trials = [Trial((change,), Figures(50, None)) for change in wanted]
    search._count_flops()
    counted = [trial.flops for trial in search.repairs.trials]
    assert counted == [flops_of((change,), run) for change in wanted]
    # Counting needs memory too: the peaks of its runs are not taken.
    assert {trial.peak_bytes for trial in search.repairs.trials} == {50}
    assert min(each for each in counted if each) > base
    assert sum(line.startswith("floating-point") for line in lines) == runs


def infer() -> None:
    """Call a product that consists of other operators where no gradients are recorded."""
    with torch.inference_mode():
        torch.matmul(torch.ones(3, 8, 64), torch.ones(64, 32))
        nn.functional.linear(torch.ones(8, 64), torch.ones(32, 64), torch.ones(32))
        query = torch.ones(1, 2, 16, 8)
        nn.functional.scaled_dot_product_attention(query, query, query)


@pytest.mark.parametrize("step", [infer, partial(small_models.train), train_nested])
def test_operations_are_those_that_torch_counts(step: Callable[[], object]) -> None:
    """The own counter, which is faster, has the same number."""

    def run() -> Figures:
        step()
        return Figures(0, None)

    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() > 1000
    assert flops_of((), run) == counter.get_total_flops()
