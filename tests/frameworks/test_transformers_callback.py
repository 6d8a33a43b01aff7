"""``integrations.transformers.MemoryCallback``: a Trainer's batches are those of a region."""

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.limits import flat_per_batch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
MemoryCallback = pytest.importorskip("pytest_cka_memory.integrations.transformers").MemoryCallback


class Model(torch.nn.Module):
    """A model as small as one for the Trainer can be; it may keep a tensor of each batch."""

    def __init__(self, leaks=False):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)
        self.kept = []
        self.leaks = leaks

    def forward(self, rows, labels=None):
        outputs = self.layer(rows)
        loss = outputs.square().mean()
        if self.leaks and self.training:
            self.kept.append(outputs.repeat(16, 1))  # more than a batch of the data
        if rows[0, 0] == 7:
            raise RuntimeError("bad batch")
        return {"loss": loss, "logits": outputs}


def rows(count, value=1.0):
    return [{"rows": torch.full((16,), value), "labels": torch.zeros(())} for _ in range(count)]


@pytest.fixture
def trainer(tmp_path):
    """Make a trainer for a model, its data and a region."""

    def make(model, region, data, **options):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to=[],
            num_train_epochs=1,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **options,
        )
        callbacks = [MemoryCallback(region)]
        return transformers.Trainer(
            model, arguments, train_dataset=data, eval_dataset=rows(12), callbacks=callbacks
        )

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("leaks", [False, True], ids=["clean", "leak"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_leak_per_batch_is_seen_and_clean_training_is_flat(trainer, leaks, accumulated):
    """Each accumulated batch is a sample for growth, and the short last batch is noted as one."""
    model = Model(leaks)
    with MemoryProbe("cpu").measure() as region:
        trainer(model, region, rows(34), gradient_accumulation_steps=accumulated).train()
    assert [sample.size for sample in region.timeline] == [4] * 8 + [2]
    assert (region.growth_bytes_per_batch > 0) is leaks
    assert (flat_per_batch().judge(region.record) is not None) is leaks
    assert not model._forward_pre_hooks


@pytest.mark.filterwarnings("ignore")
def test_batches_of_an_evaluation_count_only_outside_a_training(trainer):
    """An evaluation during a training needs other memory, so its batches are not sampled there."""
    with MemoryProbe("cpu").measure() as region:
        trainer(Model(), region, rows(20), eval_strategy="epoch").train()
    assert region.record.batches == 5
    with MemoryProbe("cpu").measure() as region:
        trainer(Model(), region, rows(4)).evaluate()
    assert region.record.batches == 3


@pytest.mark.filterwarnings("ignore")
def test_failed_training_leaves_no_hook_on_a_model_that_is_used_again(trainer):
    """The trainer does not announce that it failed, and still no hook of the callback stays."""
    model = Model()
    probe = MemoryProbe("cpu")
    with pytest.raises(RuntimeError, match="bad batch"), probe.measure() as region:
        trainer(model, region, [*rows(4), *rows(4, 7.0)]).train()
    assert region.record.batches <= 1
    model(torch.ones(1, 16))
    assert not model._forward_pre_hooks


def test_wrong_argument_is_refused():
    """A callback for something other than a region raises an error that says what to write."""
    with pytest.raises(TypeError, match="needs a region, not NoneType; write: with cka_memory"):
        MemoryCallback(None)
