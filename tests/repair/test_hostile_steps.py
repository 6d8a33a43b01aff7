"""Every change that is offered for a step keeps its numbers as promised, by running it."""

from collections.abc import Callable

import hostile_steps
import pytest
import torch
from test_no_false_promises import verdict_on
from torch import nn

from pytest_cka_memory.repair.changes import offered
from pytest_cka_memory.repair.observation import observing
from pytest_cka_memory.repair.proof import MOST_ROUNDING
from pytest_cka_memory.repair.trials import Change, Figures, tried

Step = Callable[[], nn.Module]


def numbers_of(step: Step) -> dict[str, torch.Tensor]:
    """Run a step; return what it has left: weights, and gradients of its last backward pass."""
    torch.manual_seed(0)
    model = step()
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            kept[f"gradient of {name}"] = parameter.grad.clone()
    return kept


def changes_of(step: Step) -> tuple[list[Change], dict[str, str]]:
    """Return the changes that are offered for a step, and why others are refused."""
    with observing() as observed:
        numbers_of(step)
    changes, refusals = offered(observed)
    return changes, {each.name: each.because for each in refusals}


def broken_promises(step: Step) -> dict[str, str]:
    """Return the changes that run, and change the numbers other than they say."""
    before = numbers_of(step)
    changes, _ = changes_of(step)
    found: dict[str, str] = {}
    for change in changes:
        after: dict[str, torch.Tensor] = {}

        def run(after: dict[str, torch.Tensor] = after) -> Figures:
            after.update(numbers_of(step))
            return Figures(0, None)

        trial = tried([change], run, lambda error: False)
        if trial.error or "change" in change.numbers:
            continue
        for name, value in before.items():
            if name not in after:
                # An optimizer that steps in backward frees the gradients.
                if change.name != "optimizer step in backward":
                    found[change.name] = f"no {name}"
                continue
            scale = max(float(value.abs().max()), 1e-30)
            largest = float((after[name].double() - value.double()).abs().max()) / scale
            if largest > (MOST_ROUNDING if change.numbers else 0):
                found[change.name] = f"{name}: {largest:.1e}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("step", hostile_steps.STEPS, ids=lambda step: step.__name__)
def test_changes_that_run_keep_their_promise(step: Step) -> None:
    """Weights and gradients after the step are what the change says."""
    assert broken_promises(step) == {}


STEPPING, DEPENDING = "optimizer step in backward", "rows of the batch depend on each other"
VERDICTS = {
    "average_before_the_step": (
        STEPPING,
        "refused: the step reads weights between backward and step()",
    ),
    "average_after_the_step": (STEPPING, "promised"),
    "evaluate_before_the_step": (
        STEPPING,
        "refused: the step reads weights between backward and step()",
    ),
    "change_the_rate_before_the_step": (
        STEPPING,
        "refused: options of the optimizer change between backward and step",
    ),
    "cycle_the_momentum": (STEPPING, "promised"),
    "scale_the_loss": (STEPPING, "refused: the step reads gradients between backward and step()"),
    "scale_the_loss_fused": (
        STEPPING,
        "refused: the step reads gradients between backward and step()",
    ),
    "perceive": ("no_grad", "not offered"),
    "use_a_part_of_what_is_returned": ("no_grad", "not offered"),
    "return_a_dataclass": ("checkpoint every Block", "promised"),
    "keep_state_in_the_context": ("checkpoint every MaskingBlock", "promised"),
    "keep_tensors_in_a_list": (
        "checkpoint every StackedBlock",
        "refused: its forward changes a global variable",
    ),
    "train_tied": (STEPPING, "promised"),
    "make_weights_late": ("checkpoint every Lazy", "refused: its LazyLinear has a forward hook"),
    "compile_blocks": ("checkpoint", "not offered"),
    "Contrast": ("2 micro-batches", f"numbers: changes the results: {DEPENDING}"),
    "Centred": ("2 micro-batches", f"numbers: changes the results: {DEPENDING}"),
    "Normalized": ("2 micro-batches", "refused: batch_norm computes its statistics"),
    "Noisy": ("2 micro-batches", "numbers: changes the results: each part draws random numbers"),
}


@pytest.mark.parametrize("step", hostile_steps.STEPS, ids=lambda step: step.__name__)
def test_tempting_change_is_refused_or_named(step: Step) -> None:
    """The change that tempts is refused, named or not offered; and offered where it is right."""
    name, verdict = VERDICTS[step.__name__]
    assert verdict_on(step, name).startswith(verdict)
