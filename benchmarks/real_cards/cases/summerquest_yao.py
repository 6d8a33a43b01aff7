"""Checkpointing and attention on a card of 24 GB, each configuration in its own process."""

from _attention import table
from _summerquest import COUNTS, programs, rows, sizes
from case import Case, Figure

STUDENT = "姚寓骞"
# Tokens, layers in a checkpoint (0 or none: no checkpoints), peaks allocated and reserved, in MiB.
TRAINING = """
1024 none 10078.3447265625 10270
1024 1 8123.09814453125 8168
1024 2 8123.56689453125 8178
1024 4 8122.62939453125 8230
1024 8 8122.62939453125 8226
2048 none 19685.6376953125 20164
2048 1 8148.17626953125 9186
2048 2 8582.5595703125 9976
2048 4 9588.7001953125 10882
2048 8 11607.6376953125 11936
"""
# Tokens, width, passes, and the peaks.
ATTENTION = """
512 64 forward 267.1328125 280
512 64 backward 277.375 282
512 64 forward_backward 276.875 282
512 128 forward 267.3828125 280
512 128 backward 277.75 282
512 128 forward_backward 277.25 282
2048 64 forward 309.15625 330
2048 64 backward 349.75 368
2048 64 forward_backward 341.75 364
2048 128 forward 310.15625 332
2048 128 backward 351.25 370
2048 128 forward_backward 343.25 366
8192 64 forward 972.25 1178
8192 64 backward 1494.25 1694
8192 64 forward_backward 1366.25 1694
8192 128 forward 976.25 1174
8192 128 backward 1500.25 1684
8192 128 forward_backward 1372.25 1686
"""


def _training(tokens: str, layers: str) -> str:
    return f"training, {tokens} tokens, {layers} layers in a checkpoint"


def _attention(tokens: str, width: str, passes: str) -> str:
    return f"attention, {tokens} x {width}, {passes}"


def _figures() -> dict[str, Figure]:
    found = {}
    for name, row in [
        *((_training(*row[:2]), row[2:]) for row in table(TRAINING)),
        *((_attention(*row[:3]), row[3:]) for row in table(ATTENTION)),
    ]:
        kind = "operators" if name.startswith("attention") else ""
        for size, counts in zip(row, COUNTS.values(), strict=True):
            found[f"{name}, {counts}"] = Figure(size, "MiB", counts, kind)
    return found


RUNS = {
    **{_training(*row[:2]): tuple(row[:2]) for row in table(TRAINING)},
    **{_attention(*row[:3]): tuple(row[:3]) for row in table(ATTENTION)},
}
CASE = Case(
    title="A language model of 24 layers x 1,024, checkpointed, and attention, process by process",
    source=(
        "https://github.com/OpenMOSS/SummerQuest-2026/tree/main/students/"
        "%E5%A7%9A%E5%AF%93%E9%AA%9E/assignments/A2-K"
    ),
    kind="training",
    card="rtx4090",
    real="RTX 4090, torch 2.11.0 with CUDA 12.8",
    torch="2.11",
    needs=("einx", "einops", "jaxtyping"),
    figures=_figures(),
    runs=tuple(RUNS),
    programs=programs(STUDENT),
    differs=(
        "The source's own scripts, with three steps to measure instead of five. Of the course's "
        "language model an earlier patch release."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Run one configuration."""
    if run.startswith("training"):
        tokens, layers = RUNS[run]
        named = ["--context-length", tokens, "--checkpoint-block-size", layers, "--steps", "3"]
        (row,) = rows(STUDENT, "run_checkpointing", named)
    else:
        tokens, width, passes = RUNS[run]
        named = ["--sequence-length", tokens, "--head-dim", width, "--phase", passes]
        (row,) = rows(STUDENT, "run_attention_benchmark", [*named, "--implementation", "eager"])
    return sizes(run, row)
