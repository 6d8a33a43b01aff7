"""Checkpointing and attention on a card of 24 GB, each script in one process."""

from _summerquest import attention, figures, programs, rows, sizes, training
from case import Case

STUDENT = "曹庆棚"
# Tokens, layers in a checkpoint (0 or none: no checkpoints), peaks allocated and reserved, in MiB.
TRAINING = """
1024 0 10071.9931640625 10264
1024 1 6870.6806640625 10264
1024 2 7011.2744140625 10264
1024 4 7290.5869140625 10264
1024 8 7844.5244140625 10264
2048 0 19674.4658203125 20760
2048 1 8076.0048828125 20760
2048 2 8579.4501953125 20760
2048 4 9586.3408203125 20760
2048 8 11607.6220703125 20760
"""
# Tokens, width, passes, and the peaks.
ATTENTION = """
512 64 forward 9.8125 22
512 64 backward 18.8134765625 24
512 64 forward-backward 19.1884765625 24
512 128 forward 18.5625 24
512 128 backward 19.1259765625 24
512 128 forward-backward 19.8759765625 24
2048 64 forward 41.875 64
2048 64 backward 53.5009765625 84
2048 64 forward-backward 55.0009765625 84
2048 128 forward 43.5 86
2048 128 backward 54.7509765625 86
2048 128 forward-backward 57.7509765625 88
8192 64 forward 406.75 474
8192 64 backward 597.2509765625 730
8192 64 forward-backward 603.2509765625 736
8192 128 forward 413.25 736
8192 128 backward 602.2509765625 736
8192 128 forward-backward 614.2509765625 736
"""


CASE = Case(
    title="A language model of 24 layers x 1,024, checkpointed, and attention, batch 1, bfloat16",
    source=(
        "https://github.com/OpenMOSS/SummerQuest-2026/tree/main/students/"
        "%E6%9B%B9%E5%BA%86%E6%A3%9A/assignments/A2-K"
    ),
    kind="training",
    card="rtx4090",
    real="RTX 4090, torch 2.6.0 with CUDA 12.4",
    torch="2.6",
    needs=("einx", "einops", "jaxtyping"),
    figures=figures(TRAINING, ATTENTION),
    runs=("training", "attention"),
    programs=programs(STUDENT),
    differs=(
        "The source's own scripts, with three steps and three passes to warm up and to measure "
        "instead of up to 300. Of the course's language model an earlier patch release."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Run one of the two scripts."""
    few = ["--warmup", "3"]
    found = {}
    if run == "training":
        for row in rows(STUDENT, "benchmark_checkpointing", [*few, "--steps", "3"]):
            name = training(row["context_length"], row["checkpoint_block_size"])
            found.update(sizes(name, row))
        return found
    for row in rows(STUDENT, "benchmark_attention", [*few, "--rep", "3"]):
        found.update(sizes(attention(row["seq_len"], row["head_dim"], row["phase"]), row))
    return found
