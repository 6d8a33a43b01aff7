"""A change that would break the result is refused, or its row says that the numbers change."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tempting_programs
import torch

from pytest_cka_memory.repair import proof
from pytest_cka_memory.repair.changes import offered
from pytest_cka_memory.repair.observation import observing
from pytest_cka_memory.repair.trials import Figures, keeps_numbers, tried


def verdict_on(step: Callable[[], Any], name: str) -> str:
    """Return what is known of the changes of `step` whose name begins with `name`: "refused: ...",
    "does not run: ...", "numbers: ...", or "promised" if any is promised to keep the numbers.
    """

    def run() -> Figures:
        step()
        return Figures(0, None)

    with observing() as observed:
        step()
    changes, refusals = offered(observed)
    refused = [each for each in refusals if each.name.startswith(name)]
    trials = [
        tried([change], run, lambda error: False)
        for change in changes
        if change.name.startswith(name)
    ]
    if any(trial.figures is not None and keeps_numbers(trial) for trial in trials):
        return "promised"
    if refused:
        return f"refused: {refused[0].because}"
    if trials and trials[0].figures is None:
        return f"does not run: {trials[0].error}"
    return f"numbers: {trials[0].numbers}" if trials else "not offered"


CHECKPOINTS = {
    "Counting": "refused: its forward changes self.calls, and a checkpoint runs",
    "Remembering": "refused: its forward changes self.last, and a checkpoint runs",
    "Listing": "refused: its forward changes self.shapes, and a checkpoint runs",
    "Caching": "refused: its forward changes self.cache, and a checkpoint runs",
    "Global": "refused: its forward changes a global variable, and a checkpoint runs",
    "PythonRandom": "refused: its forward draws from Python's random numbers, and a check",
    "NumpyRandom": "refused: its forward draws from NumPy's random numbers, and",
    "OwnGenerator": "refused: its forward draws from a torch.Generator of its own, and",
    "BatchNorm": "numbers: its forward changes the buffer num_batches_tracked, and",
    "Averaging": "numbers: its forward changes the buffer mean, and a checkpoint runs",
    "Spectral": "numbers: its forward changes the buffer _u, and a checkpoint runs",
    "HookInside": "refused: its Linear has a forward hook, and a checkpoint runs forward twice",
    "PreHookInside": "refused: its LayerNorm has a forward hook",
}


@pytest.mark.parametrize("kind", tempting_programs.CHECKPOINTS, ids=lambda kind: kind.__name__)
def test_blocks_that_must_not_run_twice(kind: type) -> None:
    """Checkpoints of a block with a side effect are refused, or named as changing numbers."""
    step = partial(tempting_programs.train_blocks, kind)
    found = verdict_on(step, f"checkpoint every {kind.__name__}")
    assert found.startswith(CHECKPOINTS[kind.__name__])


def test_plain_blocks_are_checkpointed() -> None:
    """The block without side effects, on which the others are based, is not refused."""
    step = partial(tempting_programs.train_blocks, tempting_programs.Block)
    assert verdict_on(step, "checkpoint every Block") == "promised"


IN_PLACE = {
    "ReadAgain": "refused: its input is read again later",
    "ReadByView": "refused: its input is read again later",
    "ReadAtTheEnd": "refused: its input is read again later",
    "OfTheUser": "refused: its input is not computed by the model",
    "OfAParameter": "refused: its input is not computed by the model",
    "SavedBySigmoid": "does not run: RuntimeError: one of the variables needed for gradient",
    "SavedByExp": "does not run: RuntimeError: one of the variables needed for gradient",
    "ReadTwice": "refused: its input is read again later",
}


@pytest.mark.parametrize("kind", tempting_programs.IN_PLACE, ids=lambda kind: kind.__name__)
def test_inputs_that_must_not_be_overwritten(kind: type) -> None:
    """An activation is not made in-place if something else needs its input."""
    step = partial(tempting_programs.train_activation, kind)
    assert verdict_on(step, "ReLU").startswith(IN_PLACE[kind.__name__])


STEPS = {
    "clip_by_norm": "the step reads gradients between backward and step()",
    "clip_by_value": "the step reads gradients between backward and step()",
    "scale_gradients": "the step reads gradients between backward and step()",
    "log_gradients": "the step reads gradients between backward and step()",
    "accumulate": "several backward passes add to one gradient",
    "keep_graph": "the step keeps a graph for another backward pass",
    "clip_in_closure": "the step reads gradients between backward and step()",
    "accumulate_in_closure": "several backward passes add to one gradient",
}


@pytest.mark.parametrize("step", tempting_programs.STEPS, ids=lambda step: step.__name__)
def test_gradients_that_are_needed_after_backward(step: Callable[[], Any]) -> None:
    """The optimizer does not step in backward if its gradients are used in between."""
    found = verdict_on(step, "optimizer step in backward")
    assert found.startswith(f"refused: {STEPS[step.__name__]}")


def test_gradients_that_are_read_after_the_step_of_a_closure() -> None:
    """The optimizer may step in backward if gradients are only read when it has stepped."""
    found = verdict_on(tempting_programs.move_after_closure, "optimizer step in backward")
    assert found == "promised"


BATCHES = {
    "normalize_batch": "refused: BatchNorm1d computes its statistics over the whole batch",
    "drop_out": "numbers: changes the results: dropout draws other numbers",
    "differentiate_twice": "refused: the step keeps a graph for another backward pass",
    "add_losses": f"numbers: {proof.NOT_A_MEAN}",
    "ignore_targets": f"numbers: {proof.IGNORED}",
    "ignore_zeros": f"numbers: {proof.IGNORED}",
    "weigh_classes": f"numbers: {proof.WEIGHTED}",
}


@pytest.mark.parametrize("step", tempting_programs.BATCHES, ids=lambda step: step.__name__)
def test_batches_that_cannot_be_split(step: Callable[[], Any]) -> None:
    """Micro-batches are refused, or named, if a layer depends on the whole batch."""
    assert verdict_on(step, "2 micro-batches") == BATCHES[step.__name__]


def classify(wanted: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the loss of eight rows."""
    model = tempting_programs.Classifier(**options)
    loss: torch.Tensor = model(torch.ones(8, tempting_programs.WIDTH), wanted)
    return loss


@pytest.mark.parametrize(
    ("wanted", "options", "numbers"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], {}, ""),
        ([0, -100, 2, -100, 4, -100, 6, -100], {}, ""),
        ([0, -100, 2, 3, 4, 5, 6, 7], {}, proof.IGNORED),
        ([0, 1, 2, 3, 4, 5, 6, 7], {"ignore_index": 9}, ""),
    ],
    ids=["none", "as-many-in-each-part", "in-one-part", "none-of-the-given"],
)
def test_targets_that_are_ignored(wanted: list[int], options: dict[str, int], numbers: str) -> None:
    """The mean over parts is the same if each part has as many targets that count."""
    loss = classify(torch.tensor(wanted), **options)
    assert proof.numbers_of_parts(loss, has_values=True) == numbers


def test_targets_without_values() -> None:
    """If targets cannot be read, an ignore_index that is given is taken to be used."""
    wanted = torch.arange(8)
    for options, numbers in (({}, ""), ({"ignore_index": 9}, proof.IGNORED)):
        loss = classify(wanted, **options)
        assert proof.numbers_of_parts(loss, has_values=False) == numbers


def test_sums_of_means_are_means() -> None:
    """An auxiliary loss with a weight is added to the mean, as in a mixture of experts."""
    loss = classify(torch.arange(8))
    assert proof.numbers_of_parts((loss + 0.1 * loss.log()).float(), has_values=True) != ""
    x = torch.ones(8, 2, requires_grad=True)
    total = (loss + 0.1 * x.square().mean()).double() / 2
    assert proof.numbers_of_parts(total, has_values=True) == ""


class Attending(torch.nn.Module):
    """Attention that is written by hand; `scores` has the shape of what the softmax gets."""

    def __init__(self, scores: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(scores[-1], scores[-1]))
        self.scores = scores

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.softmax(x.expand(self.scores) @ self.weight, dim=-1), None


@pytest.mark.parametrize(
    ("scores", "named"),
    [
        ((2, 4, 64, 64), "keeps attention weights, up to 0.13 MB in each of 2 calls"),
        ((8, 64, 64), "keeps attention weights, up to 0.13 MB in each of 2 calls"),
        ((8, 32, 64), None),
        ((64, 64), None),
    ],
    ids=["heads", "batch", "classes", "one matrix"],
)
def test_attention_by_hand_is_named_with_its_line(
    scores: tuple[int, ...], named: str | None
) -> None:
    """A softmax over a score for each pair of tokens; a softmax over classes is none."""
    model = Attending(scores)

    def step() -> None:
        for _ in range(2):
            model(torch.ones(scores[0], *scores[1:]))[0].sum().backward()

    found = verdict_on(step, "scaled_dot_product_attention")
    if named is None:
        assert found == "not offered"
    else:
        assert "the softmax at test_no_false_promises.py:" in found
        assert named in found


def test_micro_batches_of_a_model_without_a_loss_say_what_to_write() -> None:
    """The loss is computed outside the model, whose forward cannot be called for parts."""
    model = torch.nn.Linear(4, 2)

    def step() -> None:
        model(torch.ones(8, 4)).sum().backward()

    assert verdict_on(step, "micro-batches").startswith(
        "refused: Linear does not return its loss as a single tensor; to write them yourself"
    )
