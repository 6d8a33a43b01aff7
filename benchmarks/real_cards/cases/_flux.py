"""Methods of fine-tuning FLUX.2-klein-base-4B: what peft's comparison published, and how it ran."""

import os
from collections.abc import Iterable
from pathlib import Path

from _attention import table
from _flux_program import PLACE, train
from case import Case, Figure

NAMES = {
    "full-finetuning/flux2-klein-default": "full",
    "deft/flux2-klein-para": "deft, para",
    "dora/flux2-klein-rank64": "dora, rank 64",
    "lora/flux2-klein-rank64": "lora, rank 64",
}
"""What some experiments are called here; the others are called like their method."""
STEPS = 201
LATER = "the source saw its highest reserve after the 201 steps that are made here"
HUNDREDS = ("steps 1 to 100", "steps 101 to 200")


def named(experiment: str) -> str:
    """Return the name of an experiment."""
    return NAMES.get(experiment, experiment.partition("/")[0])


def figures(published: str, causes: dict[str, str]) -> dict[str, Figure]:
    """Return the figures of a text: on each line an experiment, and what was published of it.

    Args:
        published: the highest reserve of all steps, the mean allocated after steps 101 to 200, and
            the mean reserve after each hundred of the first two hundred steps.
        causes: why a method's figures differ, if that is known.
    """
    found = {}
    for experiment, most, allocated, *means in table(published):
        name = named(experiment)
        cause = causes.get(name, "")
        found[f"{name}, reserve"] = Figure(most, "bytes", "peak reserved", cause=cause or LATER)
        found[f"{name}, allocated after a step"] = Figure(
            allocated, "bytes", "allocated", cause=cause
        )
        for hundred, mean in zip(HUNDREDS, means, strict=True):
            title = f"{name}, reserved after {hundred}"
            found[title] = Figure(mean, "bytes", "reserved", cause=cause)
    return found


def case(
    experiments: Iterable[str],
    found: dict[str, Figure],
    *,
    program: str,
    torch: str,
    real: str,
    later: str = "",
    memory: str = "",
) -> Case:
    """Return the case of some experiments.

    Args:
        experiments: their names.
        found: their figures.
        program: the commit.
        torch: its version.
        real: the versions, in words.
        later: a commit that has the configuration of LoKr, if the other one does not.
        memory: of the card, if it is not that of an emulated L40.
    """
    programs = {f"huggingface/peft@{program}": ("src", PLACE)}
    if later:
        programs[f"huggingface/peft@{later}"] = (f"{PLACE}/experiments/lokr",)
    return Case(
        title="FLUX.2-klein-base-4B, 512 pixels, batch 2, bfloat16, checkpointed",
        source="https://github.com/huggingface/peft/tree/main/method_comparison/image-gen",
        kind="training",
        card="l40",
        memory=memory,
        real=f"L40S; {real}",
        torch=torch,
        figures=found,
        runs=tuple(named(experiment) for experiment in experiments),
        needs=("diffusers", "transformers", "accelerate"),
        programs=programs,
        takes=(
            "Each method is a training of its own, of about a minute on an idle machine; HRA and "
            "BOFT take four to five, in hundreds of small operators for each layer."
        ),
        differs=(
            "The source's own program with 201 of its 750 steps, so a highest reserve that the "
            "source saw later is not seen. Four denoising steps for an image instead of twenty; "
            "models without weights, and made-up images. What it computes on the CPU of whole "
            "weights (permutations, decompositions) is not computed, and kernels that BOFT would "
            "compile are not, as the number of its parameters says of the source's run, too."
        ),
    )


def measured(experiment: str) -> dict[str, float]:
    """Train as the source's own program does, and return the figures of it."""
    found = train(Path(os.environ["REAL_CARDS_PROGRAM"]), experiment, STEPS)
    name = named(experiment)
    hundreds = [row for row in found.metrics if "mem reserved avg" in row]
    return {
        f"{name}, reserve": found.accelerator_memory_max_train,
        f"{name}, allocated after a step": hundreds[1]["mem allocated avg"],
        **{
            f"{name}, reserved after {hundred}": row["mem reserved avg"]
            for hundred, row in zip(HUNDREDS, hundreds, strict=True)
        },
    }
