"""Attention of growing lengths on a card with 32 MiB of cuBLAS workspace, which keeps gradients."""

from typing import Any

from _attention import LENGTHS, WIDTHS, attention, inputs, table
from case import CUBLAS_BEFORE_2_7, Case, Figure

# Width, length, how it ran; MiB at the peak of the forward pass, and what the pass keeps.
PUBLISHED = """
16 256 eager 72.7739 4.02344
16 1024 eager 195.094 64.0938
16 4096 eager 2124.38 1024.38
16 8192 eager 8280.75 4096.75
16 16384 eager 32881.5 16385.5
32 256 eager 73.5239 4.02344
32 1024 eager 198.094 64.0938
32 4096 eager 2136.38 1024.38
32 8192 eager 8304.75 4096.75
32 16384 eager 32929.5 16385.5
64 256 eager 75.0239 4.02344
64 1024 eager 204.094 64.0938
64 4096 eager 2160.38 1024.38
64 8192 eager 8352.75 4096.75
64 16384 eager 33025.5 16385.5
128 256 eager 78.0239 4.02344
128 1024 eager 216.094 64.0938
128 4096 eager 2208.38 1024.38
128 8192 eager 8448.75 4096.75
128 16384 eager 33217.5 16385.5
16 256 compiled 68.9067 4.03125
16 1024 compiled 131.626 64.125
16 4096 compiled 1102.5 1024.5
16 8192 compiled 4189 4097
16 16384 compiled 16506 16386
32 256 compiled 69.7817 4.03125
32 1024 compiled 135.126 64.125
32 4096 compiled 1116.5 1024.5
32 8192 compiled 4217 4097
32 16384 compiled 16562 16386
64 256 compiled 71.5327 4.03125
64 1024 compiled 142.126 64.125
64 4096 compiled 1144.5 1024.5
64 8192 compiled 4273 4097
64 16384 compiled 16674 16386
128 256 compiled 75.0327 4.03125
128 1024 compiled 156.126 64.125
128 4096 compiled 1200.5 1024.5
128 8192 compiled 4385 4097
128 16384 compiled 16898 16386
"""


def _figures() -> dict[str, Figure]:
    found = {}
    for width, length, how, peak, kept in table(PUBLISHED):
        kind = "compiled" if how == "compiled" else "operators"
        name = f"{how}, {width} wide, {length} long"
        found[f"{name}, forward peak"] = Figure(peak, "MiB", "peak allocated", kind=kind)
        found[f"{name}, kept"] = Figure(kept, "MiB", "allocated", kind=kind)
    return found


CASE = Case(
    title="Attention without heads, batch 8, float32, gradients kept",
    source="https://github.com/MarkMrLi/assignment2-systems/tree/main/results/profile_attention",
    kind="operators",
    card="h100-nvl",
    real='not named, "98 GB"; torch 2.6.0 (uv.lock). Its workspaces are those of a Hopper',
    torch="2.6",
    figures=_figures(),
    runs=("eager", "compiled"),
    environment=CUBLAS_BEFORE_2_7,
    differs="Three passes of each kind instead of a hundred.",
)
REPEATED = 3


def measured(run: str) -> dict[str, int]:
    """Measure every size in one process: first without gradients, then with them."""
    import torch

    compiled = run == "compiled"
    function: Any = torch.compile(attention, dynamic=True) if compiled else attention
    found: dict[str, int] = {}
    for width in WIDTHS:
        for length in LENGTHS:
            name = f"{run}, {width} wide, {length} long"
            _inference(function, length, width)
            peak, kept = _training(function, length, width)
            found |= {f"{name}, forward peak": peak, f"{name}, kept": kept}
    return found


def _inference(function: Any, length: int, width: int) -> None:
    import torch

    given = inputs(length, width, requires_grad=False)
    with torch.no_grad():
        for _ in range(REPEATED):
            function(*given)


def _training(function: Any, length: int, width: int) -> tuple[int, int]:
    import torch

    given = inputs(length, width)
    for _ in range(REPEATED):
        out = function(*given).sum()
        out.backward()
    peaks = []
    for _ in range(REPEATED):
        for tensor in given:
            tensor.grad.zero_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = function(*given)
        out = out.sum()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated() - before))
        out.backward()
    return peaks[-1]
