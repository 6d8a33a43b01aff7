"""Attention of growing lengths whose gradient is given, eager and compiled."""

import gc
from typing import Any

from _attention import LENGTHS, WIDTHS, attention, inputs, table
from case import Case, Figure

# Width, length, how it ran, MiB after the forward pass.
PUBLISHED = """
16 256 eager 68.773
32 256 eager 69.523
64 256 eager 71.023
128 256 eager 74.023
16 1024 eager 131.094
32 1024 eager 134.094
64 1024 eager 140.094
128 1024 eager 152.094
16 4096 eager 1100.375
32 4096 eager 1112.375
64 4096 eager 1136.375
128 4096 eager 1184.375
16 8192 eager 4184.75
32 8192 eager 4208.75
64 8192 eager 4256.75
128 8192 eager 4352.75
16 16384 eager 16497.5
32 16384 eager 16545.5
64 16384 eager 16641.5
128 16384 eager 16833.5
16 256 compiled 68.781
32 256 compiled 69.531
64 256 compiled 71.031
128 256 compiled 74.031
16 1024 compiled 131.125
32 1024 compiled 134.125
64 1024 compiled 140.125
128 1024 compiled 152.125
16 4096 compiled 1100.5
32 4096 compiled 1112.5
64 4096 compiled 1136.5
128 4096 compiled 1184.5
16 8192 compiled 4185.0
32 8192 compiled 4209.0
64 8192 compiled 4257.0
128 8192 compiled 4353.0
16 16384 compiled 16498.0
32 16384 compiled 16546.0
64 16384 compiled 16642.0
128 16384 compiled 16834.0
"""

CASE = Case(
    title="Attention without heads, batch 8, float32, with the gradient of its result",
    source="https://github.com/Wedsonlin/assignment2-systems/blob/main/results/attention_benchmark.jsonl",
    kind="operators",
    card="h100",
    real="not named; torch 2.11.0 with CUDA 12.8. Its workspaces are those of a Hopper",
    torch="2.11",
    figures={
        f"{how}, {width} wide, {length} long": Figure(
            printed, "MiB", "allocated", kind="compiled" if how == "compiled" else "operators"
        )
        for width, length, how, printed in table(PUBLISHED)
    },
    runs=("eager", "compiled"),
    differs="Two passes of each kind instead of the source's number.",
)


def measured(run: str) -> dict[str, int]:
    """Measure every size in one process, short first."""
    import torch

    function: Any = attention
    if run == "compiled":
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False
        function = torch.compile(attention)
    found: dict[str, int] = {}
    for length in LENGTHS:
        for width in WIDTHS:
            given = inputs(length, width)
            gradient = torch.randn_like(given[0])
            for _ in range(2):
                out = function(*given)
                out.backward(gradient)
                _drop(given)
            _release()
            for _ in range(2):
                function(*given)
            _release()
            output = function(*given)
            found[f"{run}, {width} wide, {length} long"] = torch.cuda.memory_allocated()
            output.backward(gradient, retain_graph=True)
            _drop(given)
            del given, gradient
            _release()
    return found


def _drop(given: list[Any]) -> None:
    for tensor in given:
        tensor.grad = None


def _release() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()
