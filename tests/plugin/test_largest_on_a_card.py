"""``cka_memory.largest`` on emulated cards: the numbers that are computed by hand."""

import pytest

pytestmark = pytest.mark.emulates

TEST = """
import torch

MB = 2**20
FREE_MB = (int(14.56 * 2**30) - 2**29) / MB  # a T4 without its CUDA context: 14,397.44 MB


def test_tensors(cka_memory):
    step = lambda n: torch.empty(n * 64 * MB, dtype=torch.uint8, device="cuda")
    assert cka_memory.largest(step) == 224 == FREE_MB // 64
    assert cka_memory.largest(step, at_most=100) == 100
    assert cka_memory.largest(lambda n: step(225)) == 0
    assert cka_memory.largest(step, limit_mb=640) == 10


def test_training(cka_memory):
    weight = torch.ones(4 * MB, device="cuda", requires_grad=True)  # 16 MB
    optimizer = torch.optim.Adam([weight])

    def step(n):
        optimizer.zero_grad()
        (torch.empty(n, 4 * MB, device="cuda") * weight).sum().backward()
        optimizer.step()

    # An item has 16 MB of input and 16 MB of gradient before it is summed. Beside them are the
    # weight, its gradient, and from the first call on Adam's two averages, of 16 MB each.
    assert cka_memory.largest(step) == 447 == (FREE_MB - 4 * 16) // 32
"""


def test_largest_batch_of_a_t4(session):
    """The search finds how many items fit into the memory that PyTorch reports for a T4."""
    run = session(TEST, "--cka-memory-device=emulate:cuda:t4,values=off", forked=True)
    run.assert_outcomes(passed=2)
