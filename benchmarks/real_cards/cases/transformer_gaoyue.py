"""Forward and backward passes of two language models, as a student's own program makes them."""

import _own_program
from case import Case, Figure

SMALL = ("768", "12", "12", "3072", "64")
LARGE = ("1280", "36", "20", "5120", "32")
# Width, layers, heads, inner width and batch; whether forward only, autocast; allocated, reserved.
RUNS = {
    "small, forward": (SMALL, True, False, "0.53", "47.73"),
    "small, training": (SMALL, False, False, "0.54", "26.18"),
    "small, forward, autocast": (SMALL, True, True, "0.53", "33.61"),
    "small, training, autocast": (SMALL, False, True, "0.54", "19.46"),
    "large, training": (LARGE, False, False, "4.02", "58.26"),
    "large, forward, autocast": (LARGE, True, True, "4.01", "80.44"),
    "large, training, autocast": (LARGE, False, True, "4.02", "43.48"),
}
CAUSE = "the same requests, in other free blocks: addresses decide"


def _figures() -> dict[str, Figure]:
    found = {}
    for run, (*_, allocated, reserved) in RUNS.items():
        found[f"{run}, allocated"] = Figure(allocated, "GB", "allocated")
        found[f"{run}, reserved"] = Figure(reserved, "GB", "reserved", cause=CAUSE)
    return found


CASE = Case(
    title="Language models of 0.13 and 0.97 billion parameters, 256 tokens, batch 64 and 32",
    source=(
        "https://github.com/GAOYUEtianc/Stanford-CS336-assignments/blob/main/"
        "assignment2-systems/answers.md"
    ),
    kind="training",
    card="a100",
    real="A100 80GB PCIe; torch 2.6.0 (uv.lock)",
    torch="2.6",
    figures=_figures(),
    runs=tuple(RUNS),
    programs={
        "GAOYUEtianc/Stanford-CS336-assignments@f06a68cece06a5949eadc8912c9e09aa723d28ce": (
            "assignment1",
            "assignment2-systems/benchmarking_script.py",
        )
    },
    differs="The source's own program.",
)


def measured(run: str) -> dict[str, int]:
    """Run the program, and return what it prints at its end."""
    import torch

    levels = {}

    def kept(counts: str) -> None:
        ask = getattr(torch.cuda, f"memory_{counts}")

        def asked() -> int:
            levels[f"{run}, {counts}"] = ask()
            return levels[f"{run}, {counts}"]

        setattr(torch.cuda, f"memory_{counts}", asked)

    kept("allocated")
    kept("reserved")
    sizes, forward_only, autocast, *_ = RUNS[run]
    names = ("--d_model", "--num_layers", "--num_heads", "--d_ff", "--batch_size")
    arguments = [text for pair in zip(names, sizes, strict=True) for text in pair]
    arguments += ["--context_length", "256", "--num_warmup", "5", "--num_measurements", "10"]
    arguments += ["--forward_only"] if forward_only else []
    arguments += ["--use_amp", "--amp_dtype", "bfloat16"] if autocast else []
    _own_program.script("assignment2-systems/benchmarking_script.py", arguments, main=True)
    return levels
