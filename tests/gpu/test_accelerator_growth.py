"""Growth on an accelerator, of loops that leave garbage in reference cycles."""

import pytest
import torch
from growth_programs import WAYS, KeepsOne, LeavesOne, check_random_loops, growth

from pytest_cka_memory import MemoryProbe


class ExplainsGrowth:
    """Asks for growth after six batches."""

    draws_paths = False

    def figures_to_explain(self, record):
        return {"growth_bytes_per_batch"} if record.batches >= 6 else ()

    def named_values(self):
        return {}


@pytest.mark.parametrize("way", WAYS)
def test_growth_beside_garbage_is_exact(probe, way):
    """An object that is garbage only after the loop keeps 4096 bytes per batch, which is the
    growth.
    """
    device = str(probe.device)
    for batches in (8, 11, 15, 50):
        parts = lambda: [KeepsOne(device), LeavesOne(device, keeps_last=True)]  # noqa: E731
        assert growth(probe, parts, batches, way) == 4096, batches


def test_growth_of_random_loops_is_true_to_the_byte(probe):
    """In loops of 5 to 40 batches, cycles made before, in and after
    them do not change the growth.
    """
    check_random_loops(probe, str(probe.device), range(36))


@pytest.mark.slow
def test_graph_that_only_c_code_references_is_named(probe):
    """While sum() runs over the losses of micro-batches, their graphs are one group per line."""
    model = torch.nn.Linear(64, 64).to(probe.device)
    batches = [torch.ones(64, 64, device=probe.device) for _ in range(8)]
    with MemoryProbe(str(probe.device), explainer=ExplainsGrowth()).measure() as region:
        sum(model(batch).square().mean() for batch in region.batches(batches)).backward()
    (largest,) = region.record.grown
    assert largest.batches > 4
    assert "references a tensor, made by `sum(model(batch).square().mean()" in largest.hint
    assert "if backward() is called on the sum" in largest.hint


@pytest.mark.slow
def test_graph_of_which_only_nodes_grow_is_named(probe):
    """A sum of losses after their backward passes keeps nodes of C++, and no byte of the device."""
    pytest.importorskip("psutil")
    weight = torch.ones(8, device=probe.device, requires_grad=True)
    total = torch.zeros((), device=probe.device)
    with MemoryProbe(str(probe.device), also=["process"]).measure() as region:
        for _ in region.batches(range(12)):
            for _ in range(200):  # so many batches and nodes that growth of the process is judged
                loss = weight.square().sum()
                loss.backward()
                total += loss
    assert region.growth_bytes_per_batch == 0
    assert region.record.growing_graph.startswith("the autograd graph of `total` in test_graph_of")
