"""Attention with a causal mask, eager and compiled, on a card with 32 MiB of cuBLAS workspace."""

from typing import Any

from _attention import LENGTHS, WIDTHS, attention, inputs, table
from case import CUBLAS_BEFORE_2_7, Case, Figure

# Width, length, how it ran, MiB before the backward pass.
PUBLISHED = """
16 256 eager 68.9614
16 1024 eager 132.594
16 4096 eager 1118.38
16 8192 eager 4252.75
16 16384 eager 16761.5
32 256 eager 69.8364
32 1024 eager 136.094
32 4096 eager 1132.38
32 8192 eager 4280.75
32 16384 eager 16817.5
64 256 eager 71.5864
64 1024 eager 143.094
64 4096 eager 1160.38
64 8192 eager 4336.75
64 16384 eager 16929.5
128 256 eager 75.0864
128 1024 eager 157.094
128 4096 eager 1216.38
128 8192 eager 4448.75
128 16384 eager 17153.5
16 1024 compiled 132.625
16 4096 compiled 1118.5
16 8192 compiled 4253
16 16384 compiled 16762
32 256 compiled 69.8442
32 1024 compiled 136.125
32 4096 compiled 1132.5
32 8192 compiled 4281
32 16384 compiled 16818
64 256 compiled 71.5942
64 1024 compiled 143.125
64 4096 compiled 1160.5
64 8192 compiled 4337
64 16384 compiled 16930
128 256 compiled 75.0942
128 1024 compiled 157.125
128 4096 compiled 1216.5
128 8192 compiled 4449
128 16384 compiled 17154
"""

CASE = Case(
    title="Attention with a causal mask, batch 8, float32",
    source="https://github.com/yyin-dev/cs336-a2/tree/main/data/attention_benchmark",
    kind="operators",
    card="h100",
    real="an A100 with 40 GB, it says, but the workspaces are a Hopper's; torch 2.6.0 (uv.lock)",
    torch="2.6",
    figures={
        f"{how}, {width} wide, {length} long": Figure(
            printed, "MiB", "allocated", kind="compiled" if how == "compiled" else "operators"
        )
        for width, length, how, printed in table(PUBLISHED)
    },
    runs=("eager", "compiled"),
    environment=CUBLAS_BEFORE_2_7,
    differs="Three passes of each kind instead of ten and a hundred.",
    seen="The first run was on an A100, as the text says: the compiled rows were off by 47.75 MiB.",
)
REPEATED = 3


def measured(run: str) -> dict[str, int]:
    """Measure every size in one process: gradients are kept, and the mask is built from floats."""
    import torch

    function: Any = attention
    if run == "compiled":
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False
        function = torch.compile(attention)
    found: dict[str, int] = {}
    for width in WIDTHS:
        for length in LENGTHS:
            given = inputs(length, width)
            mask = torch.tril(torch.ones((length, length), device="cuda")).bool()
            for _ in range(REPEATED):
                out = function(*given, mask)
                loss = out.sum()
                loss.backward()
            for _ in range(REPEATED):
                out = function(*given, mask)
            found[f"{run}, {width} wide, {length} long"] = torch.cuda.memory_allocated()
            out = function(*given, mask)
            loss = out.sum()
            for _ in range(REPEATED):
                loss.backward(retain_graph=True)
            torch.cuda.empty_cache()
    return found
