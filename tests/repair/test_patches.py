"""What a report says to write has the peak that the trial had, and the numbers that it promises."""

import gc
import importlib.util
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import small_models
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.repair import patched, proof
from pytest_cka_memory.repair.changes import checkpointing, offered
from pytest_cka_memory.repair.observation import observing
from pytest_cka_memory.repair.trials import Change, Figures, Trial, tried
from pytest_cka_memory.repair.written import step_in_backward

# Not in the whole folder: a deletion finds the function that it changes by the collector's list.
pytestmark = pytest.mark.usefixtures("imports_excluded_from_search")
STEP = {"vocabulary": 1_000, "batch": 4}
NAMES = [
    "checkpoint every Block",
    "checkpoint every 2nd Block",
    "checkpoint every Block but its matrix products",
    "checkpoint every Sequential",
    "cross-entropy in 8 parts",
    "optimizer step in backward",
    "2 micro-batches",
    "4 micro-batches",
    "bfloat16 autocast",
    "bfloat16 weights",
]


@pytest.fixture(scope="module")
def changes() -> dict[str, Change]:
    """Return every change that applies to the training of the small model, by its name."""
    with observing() as observed:
        small_models.train(**STEP)
    found, _ = offered(observed)
    every = next(change for change in found if change.name == "checkpoint every Block")
    return {change.name: change for change in [*found, *checkpointing.variants(every)]}


def measured(step: Callable[[], Any]) -> Figures:
    """Run a step twice, because a first run may allocate more; return what the second needed."""
    for _ in range(2):
        gc.collect()
        region = MemoryProbe("cpu").run(step)
        del region.result
    return Figures(region.peak_bytes - region.start_bytes, None)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Trial], ModuleType]:
    """Return a function that imports a copy of the model's file, patched as a trial says."""

    def load(trial: Trial) -> ModuleType:
        assert trial.edits is not None
        (text,) = patched(trial.edits).values()
        path = tmp_path / "patched_models.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("patched_models", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_every_change_for_a_training_step_is_tested(changes: dict[str, Change]) -> None:
    """NAMES has every change that applies to the step."""
    assert sorted(changes) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_patched_copy_has_the_predicted_peak(
    changes: dict[str, Change], copy_of: Callable[[Trial], ModuleType], name: str
) -> None:
    """The peak of the patched copy is that of the trial, to the byte."""
    step = partial(small_models.train, **STEP)
    trial = tried([changes[name]], lambda: measured(step), lambda error: False)
    copy = copy_of(trial)
    assert trial.error == ""
    assert measured(partial(copy.train, **STEP)).peak_bytes == trial.peak_bytes


@pytest.mark.parametrize("name", NAMES)
def test_patched_copy_has_the_promised_numbers(
    changes: dict[str, Change],
    copy_of: Callable[[Trial], ModuleType],
    tmp_path: Path,
    name: str,
) -> None:
    """Losses and gradients of the patched copy are equal, or differ as the change says."""
    copy = copy_of(Trial((changes[name],), Figures(0, None)))
    for file, module in (("before", small_models), ("after", copy)):
        with proof.values_kept(str(tmp_path / file)):
            module.train(**STEP)
    found = proof.difference(str(tmp_path / "before"), str(tmp_path / "after"))
    numbers = changes[name].numbers
    assert found.compared > 30
    if not numbers:
        assert found.is_equal, found
    elif "change" in numbers:
        assert 1e-3 < found.largest < 1, found
    else:
        assert 0 < found.largest <= proof.MOST_ROUNDING, found


@pytest.fixture(scope="module")
def plain() -> Figures:
    """Return the figures of a step before any trial of `test_a_trial_leaves_nothing_behind`."""
    return measured(partial(small_models.train, **STEP))


@pytest.mark.parametrize("name", NAMES)
def test_a_trial_leaves_nothing_behind(
    changes: dict[str, Change], plain: Figures, name: str
) -> None:
    """After a trial, also one that ended with an exception, the step is what it was before."""

    def fails() -> Figures:
        small_models.train(**STEP)
        raise RuntimeError("at the end")

    before = (vars(small_models.Block)["forward"], vars(small_models.Model)["forward"])
    trial = tried([changes[name]], fails, lambda error: False)
    assert trial.error == "RuntimeError: at the end"
    assert (vars(small_models.Block)["forward"], vars(small_models.Model)["forward"]) == before
    assert measured(partial(small_models.train, **STEP)) == plain


@pytest.mark.native
@pytest.mark.slow
def test_all_edits_of_a_combination_are_in_one_copy(
    changes: dict[str, Change], copy_of: Callable[[Trial], ModuleType]
) -> None:
    """A combination of four changes has the predicted peak, to the byte."""
    names = (NAMES[0], NAMES[4], NAMES[6], NAMES[8])
    step = partial(small_models.train, **STEP)
    some = [changes[name] for name in names]
    trial = tried(some, lambda: measured(step), lambda error: False)
    assert trial.error == ""
    assert measured(partial(copy_of(trial).train, **STEP)).peak_bytes == trial.peak_bytes
    assert torch.is_grad_enabled()


def test_optimizers_of_single_parameters_have_the_options_of_the_whole(
    copy_of: Callable[[Trial], ModuleType],
) -> None:
    """The trial keeps as many momentum buffers as the patched copy, and both as many as SGD."""
    with observing() as observed:
        small_models.train_with_momentum()
    change = next(c for c in offered(observed)[0] if c.name == "optimizer step in backward")

    def kept(train: Callable[[], tuple[Any, Any]]) -> int:
        model, optimizer = train()
        parts = [own for own, _ in getattr(optimizer, "of_parameter", {}).values()]
        states = [state for own in parts or [optimizer] for state in own.state.values()]
        assert len(states) == len(list(model.parameters()))
        assert {own.param_groups[0]["lr"] for own in parts} <= {0.01}
        return sum("momentum_buffer" in state for state in states)

    numbers: list[int] = [kept(small_models.train_with_momentum)]

    def run() -> Figures:
        numbers.append(kept(small_models.train_with_momentum))
        return Figures(0, None)

    trial = tried([change], run, lambda error: False)
    assert trial.error == ""
    numbers.append(kept(copy_of(trial).train_with_momentum))
    assert numbers[0] > 30
    assert numbers == numbers[:1] * 3


def test_inputs_are_converted_with_weights(copy_of: Callable[[Trial], ModuleType]) -> None:
    """A model that is called with floats gets bfloat16 ones, in the trial and in the copy."""
    with observing() as observed:
        small_models.train_on_floats()
    change = next(c for c in offered(observed)[0] if c.name == "bfloat16 weights")
    plain = measured(small_models.train_on_floats)
    trial = tried([change], lambda: measured(small_models.train_on_floats), lambda error: False)
    assert trial.error == ""
    assert trial.peak_bytes < plain.peak_bytes
    assert measured(copy_of(trial).train_on_floats).peak_bytes == trial.peak_bytes


def test_observing_a_step_keeps_no_tensor() -> None:
    """A node whose result is saved for its own backward pass is freed with the step."""
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Sigmoid())
    batch = torch.ones(100, 100)

    def observe() -> None:
        with observing():
            model(batch)

    observe()
    assert MemoryProbe("cpu").run(observe).retained_bytes == 0


def test_model_is_freed_whose_optimizer_steps_in_backward() -> None:
    """The hooks of the parameters do not keep the parameters alive."""
    model = torch.nn.Linear(10, 10)
    optimizer = step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    before = model.weight.detach().clone()
    model(torch.ones(2, 10)).sum().backward()
    assert model.weight.grad is None
    assert not torch.equal(model.weight, before)
    weight = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None
