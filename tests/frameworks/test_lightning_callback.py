"""``integrations.lightning.MemoryCallback``: a Trainer's batches are those of a region."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.integrations import lightning as integration
from pytest_cka_memory.integrations.lightning import MemoryCallback
from pytest_cka_memory.limits import flat_per_batch

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(scope="module", params=["lightning.pytorch", "pytorch_lightning"])
def package(request: pytest.FixtureRequest) -> Any:
    """Each of the two distributions."""
    return pytest.importorskip(request.param)


@pytest.fixture(scope="module")
def model(package: Any) -> Callable[..., Any]:
    """Make a tiny model; ``leaks`` keeps the loss of each batch with its graph."""

    class Model(package.LightningModule):  # type: ignore[misc]
        def __init__(self, leaks: bool = False) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 4)
            self.kept: list[torch.Tensor] = []
            self.leaks = leaks

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = self.layer(batch).square().mean()
            if self.leaks:
                self.kept.append(loss)
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.layer(batch)

        test_step = predict_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    return Model


def loader(items: int = 36) -> Any:
    return torch.utils.data.DataLoader(torch.ones(items, 16), batch_size=4)


def trainer(package: Any, callback: object, **options: object) -> Any:
    return package.Trainer(callbacks=callback, **{**QUIET, **options})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("leaks", [False, True], ids=["clean", "leak"])
def test_leak_per_batch_is_seen_and_clean_training_is_flat(package, model, leaks):
    """Lightning's loop is not user code, so a callback samples its
    batches and notes the short one.
    """
    made = model(leaks)
    with MemoryProbe("cpu").measure() as region:
        trainer(package, [MemoryCallback(region)]).fit(made, loader(34))
    assert [sample.size for sample in region.timeline] == [4] * 8 + [2]
    verdict = flat_per_batch().judge(region.record)
    assert (verdict is not None) is leaks
    assert (region.growth_bytes_per_batch > 0) is leaks


@pytest.mark.filterwarnings("ignore")
def test_accumulated_batches_count_and_those_of_validation_do_not(package, model):
    """Batches of training are sampled, those of validation are not; the callback needs no list."""
    made = model()
    with MemoryProbe("cpu").measure() as region:
        trained = trainer(package, MemoryCallback(region), accumulate_grad_batches=3)
        trained.fit(made, loader(), loader())
    assert region.record.batches == 9
    assert region.growth_bytes_per_batch == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_batches_without_training_are_sampled(package, model, method):
    """Validation, testing and prediction have hooks of their own,
    and the callback samples in each.
    """
    made = model()
    with MemoryProbe("cpu").measure() as region:
        options = {} if method == "predict" else {"verbose": False}
        getattr(trainer(package, [MemoryCallback(region)]), method)(made, loader(), **options)
    assert region.record.batches == 9


@pytest.mark.filterwarnings("ignore")
def test_callback_outside_its_region_does_nothing(package, model):
    """A trainer may be used again after the region ended; its callback then samples nothing."""
    with MemoryProbe("cpu").measure() as region:
        callback = MemoryCallback(region)
    trainer(package, [callback]).fit(model(), loader())
    assert region.record.batches == 0


def test_callback_is_one_of_what_was_imported(package):
    """The callback is an instance of the ``Callback`` of the
    package of Lightning that is imported.
    """
    with MemoryProbe("cpu").measure() as region:
        callback = MemoryCallback(region)
    assert isinstance(callback, package.Callback)
    assert isinstance(callback, MemoryCallback)
    assert type(callback) is type(MemoryCallback(region))


def test_wrong_argument_is_refused():
    """A callback for something other than a region raises an error that says what to write."""
    with pytest.raises(TypeError, match="needs a region, not MemoryProbe; write: with cka_memory"):
        MemoryCallback(MemoryProbe("cpu"))


def test_missing_lightning_is_named(monkeypatch):
    """If neither package of Lightning is installed, the error names both."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(integration, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="neither lightning nor pytorch_lightning is installed"):
        MemoryCallback(None)
