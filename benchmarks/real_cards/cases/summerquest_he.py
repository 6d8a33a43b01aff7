"""Checkpointing on a card of 24 GB, by the script of a third student."""

from _attention import table
from _summerquest import COUNTS, programs, rows, sizes
from case import Case, Figure

STUDENT = "何思洋"
# Tokens, layers in a checkpoint (or none), peaks allocated and reserved, in MiB.
TRAINING = """
1024 none 10066.58740234375 10244
1024 1 8117.8095703125 8150
1024 2 8117.8095703125 8202
1024 4 8117.8095703125 8184
1024 8 8117.8095703125 8206
2048 none 19664.12255859375 20192
2048 8 11593.65380859375 11994
"""


def _name(tokens: str, layers: str) -> str:
    return f"training, {tokens} tokens, {layers} layers in a checkpoint"


def _figures() -> dict[str, Figure]:
    return {
        f"{_name(tokens, layers)}, {counts}": Figure(size, "MiB", counts)
        for tokens, layers, *peaks in table(TRAINING)
        for size, counts in zip(peaks, COUNTS.values(), strict=True)
    }


CASE = Case(
    title="A language model of 24 layers x 1,024, checkpointed, batch 1, bfloat16",
    source=(
        "https://github.com/OpenMOSS/SummerQuest-2026/tree/main/students/"
        "%E4%BD%95%E6%80%9D%E6%B4%8B/assignments/A2-K"
    ),
    kind="training",
    card="rtx4090",
    real="RTX 4090, torch 2.11.0 with CUDA 12.6",
    torch="2.11",
    needs=("einx", "einops", "jaxtyping"),
    figures=_figures(),
    runs=("1024", "2048"),
    programs=programs(STUDENT),
    differs=(
        "The source's own script, unchanged. Of the course's language model an earlier patch "
        "release."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Run the script for one length."""
    named = [] if run == "1024" else ["--block-size", "none", "--block-size", "8"]
    found = {}
    for row in rows(STUDENT, "checkpointing", ["--context-length", run, *named]):
        found.update(sizes(_name(run, row["checkpoint_block_size"] or "none"), row))
    return found
