"""``integrations.accelerate.batches``: a prepared loader whose batches are those of a region."""

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.integrations.accelerate import batches

accelerate = pytest.importorskip("accelerate")


@pytest.mark.parametrize("leaks", [False, True], ids=["clean", "leak"])
@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
def test_leak_per_batch_is_seen_and_clean_training_is_flat(leaks, prepared):
    """Every accumulated batch is a sample for growth, and Accelerate
    prepares the loader only once.
    """
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = torch.utils.data.DataLoader(torch.ones(34, 16), batch_size=4)
    loader = accelerator.prepare(loader) if prepared else loader
    model = torch.nn.Linear(16, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    kept, synchronized = [], []
    with MemoryProbe("cpu").measure() as region:
        for batch in batches(region, accelerator, loader):
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            synchronized.append(accelerator.sync_gradients)
            if leaks:
                kept.append(loss)
    assert [sample.size for sample in region.timeline] == [4] * 8 + [2]
    assert synchronized == [False, True] * 4 + [True]  # the last batch is known to be the last
    assert (region.growth_bytes_per_batch > 0) is leaks
