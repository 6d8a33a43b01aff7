"""A card runs kernels of the highest compiled architecture that is not above its own."""

import pytest

pytestmark = pytest.mark.emulates
PROGRAM = """
import torch

rows = torch.zeros(4096, dtype=torch.long, device="cuda")
weight = torch.empty(1000, 8, device="cuda", requires_grad=True)
torch.nn.functional.embedding(rows, weight).sum().backward()  # sorts the rows with CUB
torch.sort(rows.float())
torch.cumsum(rows, 0)
torch.bincount(rows, minlength=1000)
print("all ran")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True], ids=["before torch", "after torch"])
@pytest.mark.parametrize("card", ["rtx4090", "l40", "h100"])
def test_kernels_that_cub_launches_run_on_each_card(python, card, is_late):
    """Compute capability 8.9 has no kernels of its own in torch's wheels, so those of 8.6 run."""
    load = f"import emulated_cuda; emulated_cuda.load('{card}', values=False)\n"
    run = python("-c", "import torch\n" * is_late + load + PROGRAM, forked=is_late)
    assert run.stdout.splitlines() == ["all ran"], run.stderr
