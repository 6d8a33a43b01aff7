"""Attention of growing lengths on an A800, inputs made again for each pass."""

import gc

from _attention import LENGTHS, WIDTHS, attention, inputs, table
from case import CUBLAS_BEFORE_2_7, Case, Figure

# Width, length, GiB before the backward pass.
PUBLISHED = """
16 256 0.020
16 1024 0.080
16 4096 1.022
16 8192 4.028
16 16384 16.041
32 256 0.021
32 1024 0.081
32 4096 1.028
32 8192 4.040
32 16384 16.064
64 256 0.021
64 1024 0.084
64 4096 1.040
64 8192 4.063
64 16384 16.111
128 256 0.023
128 1024 0.090
128 4096 1.063
128 8192 4.110
128 16384 16.205
"""

CASE = Case(
    title="Attention without heads, batch 8, float32, new inputs for each pass",
    source="https://github.com/EnzoDing-rgb/cs336-assignment2-systems/blob/main/reports/benchmarking-scaled-dot-product-attention.md",
    kind="operators",
    card="a100",
    real="A800-SXM4-80GB, torch 2.5.1 with CUDA 12.4",
    torch="2.5",
    figures={
        f"{width} wide, {length} long": Figure(printed, "GiB", "allocated")
        for width, length, printed in table(PUBLISHED)
    },
    environment=CUBLAS_BEFORE_2_7,
    differs="Two passes to warm up instead of five.",
)


def measured(run: str) -> dict[str, int]:
    """Measure every size in one process, after two passes whose inputs are dropped."""
    import torch

    found: dict[str, int] = {}
    for width in WIDTHS:
        for length in LENGTHS:
            for _ in range(2):
                given = inputs(length, width)
                out = attention(*given).sum()
                out.backward()
                del given, out
                gc.collect()
                torch.cuda.empty_cache()
            given = inputs(length, width)
            out = attention(*given).sum()
            found[f"{width} wide, {length} long"] = torch.cuda.memory_allocated()
            out.backward()
            del given, out
    return found
