"""Checkpointing and attention on a card of 24 GB, by the scripts of a second student."""

from _summerquest import attention, figures, programs, rows, sizes, training
from case import Case

STUDENT = "王扬"
ATTENTION_FILE = "attention_baseline.csv"
# Tokens, layers in a checkpoint (0 or none: no checkpoints), peaks allocated and reserved, in MiB.
TRAINING = """
1024 none 10066.1259765625 10172
1024 1 8116.87939453125 10172
1024 2 8116.87939453125 10172
1024 4 8116.87939453125 10172
1024 8 8116.87939453125 10172
2048 none 19665.0751953125 20668
2048 1 8137.14501953125 20668
"""
# Tokens, width, passes, and the peaks.
ATTENTION = """
512 64 forward 265.9453125 278
512 64 backward 18.875 280
512 64 forward-backward 274.875 280
512 128 forward 274.3828125 280
512 128 backward 19.25 280
512 128 forward-backward 275.25 280
2048 64 forward 297.53125 320
2048 64 backward 53.75 320
2048 64 forward-backward 309.75 320
2048 128 forward 298.78125 320
2048 128 backward 55.25 322
2048 128 forward-backward 311.25 322
8192 64 forward 661.375 706
8192 64 backward 598.25 710
8192 64 forward-backward 854.25 966
8192 128 forward 666.375 966
8192 128 backward 604.25 966
8192 128 forward-backward 860.25 966
"""


CASE = Case(
    title="A language model of 24 layers x 1,024, checkpointed, and attention, batch 1, bfloat16",
    source=(
        "https://github.com/OpenMOSS/SummerQuest-2026/tree/main/students/"
        "%E7%8E%8B%E6%89%AC/assignments/A2-K"
    ),
    kind="training",
    card="rtx4090",
    real="RTX 4090, torch 2.10.0 with CUDA 12.8",
    torch="2.10",
    needs=("einx", "einops", "jaxtyping"),
    figures=figures(TRAINING, ATTENTION),
    runs=("training", "attention"),
    programs=programs(STUDENT),
    differs=(
        "The source's own scripts, unchanged. Of the course's language model an earlier patch "
        "release, and torch 2.11."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Run one of the two scripts."""
    found = {}
    if run == "training":
        for row in rows(STUDENT, "run_checkpointing", [], "checkpointing.csv"):
            name = training(row["context_length"], row["checkpoint_block_size"])
            found.update(sizes(name, row))
        return found
    for row in rows(STUDENT, "run_attention_benchmarks", ["--mode", "baseline"], ATTENTION_FILE):
        found.update(sizes(attention(row["sequence_length"], row["head_dim"], row["phase"]), row))
    return found
