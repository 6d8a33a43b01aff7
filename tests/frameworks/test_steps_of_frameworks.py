"""``region.each_step`` around trainings of frameworks: one boundary for each optimizer step."""

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.integrations.batch_sampling import BatchSampling


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "every"])
def test_step_of_accelerate_is_one_boundary(is_named):
    """Accelerate's wrapped optimizer skips the steps of accumulated
    batches; they are no boundary.
    """
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(16, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with (
        MemoryProbe("cpu").measure() as region,
        region.each_step(*([optimizer] if is_named else [])),
    ):
        for _ in range(12):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(4, 16)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    assert len(region.timeline) == 6
    assert region.growth_bytes_per_batch == 0


def test_step_of_lightning_is_one_boundary():
    """Lightning's optimizer step gets a closure with forward and backward pass: one boundary."""
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 4)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(torch.ones(48, 16), batch_size=4)
    with MemoryProbe("cpu").measure() as region, region.each_step():
        trainer.fit(Model(), loader)
    assert len(region.timeline) == 6
    assert region.growth_bytes_per_batch == 0


def test_step_of_transformers_is_one_boundary(tmp_path):
    """The Trainer of Transformers uses Accelerate's wrapper, so each real step is one boundary."""
    transformers = pytest.importorskip("transformers")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 4)

        def forward(self, rows):
            return {"loss": self.layer(rows).square().mean()}

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    rows = [{"rows": torch.ones(16)} for _ in range(48)]
    with MemoryProbe("cpu").measure() as region, region.each_step():
        transformers.Trainer(Model(), arguments, train_dataset=rows).train()
    assert len(region.timeline) == 6


def test_callback_samples_nothing_while_steps_are_counted():
    """While steps are counted, a framework's callback adds no sample, so each batch counts once."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with MemoryProbe("cpu").measure() as region:
        sampling = BatchSampling(region)
        with region.each_step():
            for _ in range(3):
                weight.sum().backward()
                optimizer.step()
                sampling.sample(size=4)
        assert len(region.timeline) == 3
        sampling.sample(size=4)
    assert len(region.timeline) == 4
