"""Attention with a causal mask, whose peak is that of a forward and a backward pass."""

from typing import Any

from _attention import LENGTHS, WIDTHS, attention, inputs, table
from case import CUBLAS_OF_BLACKWELL, Case, Figure

# Width, length, MiB before the backward pass, and at the peak.
PUBLISHED = """
16 256 20.8 29.0
16 1024 83.4 211.9
16 4096 1064.7 3114.7
16 8192 4193.1 12389.1
16 16384 16689.9 49465.9
32 256 21.3 29.6
32 1024 85.4 214.4
32 4096 1072.7 3124.7
32 8192 4209.1 12409.1
32 16384 16721.9 49505.9
64 256 22.3 30.8
64 1024 89.4 219.4
64 4096 1088.7 3144.7
64 8192 4241.1 12449.1
64 16384 16785.9 49585.9
128 256 24.3 33.3
128 1024 97.4 229.4
128 4096 1120.7 3184.7
128 8192 4305.1 12529.1
128 16384 16913.9 49745.9
"""


def _figures() -> dict[str, Figure]:
    found = {}
    for width, length, before, peak in table(PUBLISHED):
        name = f"{width} wide, {length} long"
        found[f"{name}, before backward"] = Figure(before, "MiB", "allocated")
        found[f"{name}, peak"] = Figure(peak, "MiB", "peak allocated")
    return found


CASE = Case(
    title="Attention with a causal mask, batch 8, float32, tensor cores allowed",
    source="https://github.com/duoan/cs336-assignment2-systems/blob/main/benchmark_results/attention_benchmark.txt",
    kind="operators",
    card="rtx5090",
    memory="94.97GiB",
    real="not named, but Blackwell with 94.97 GiB, as a log there says; torch 2.11.0 (uv.lock)",
    torch="2.11",
    figures=_figures(),
    environment=CUBLAS_OF_BLACKWELL,
    differs="Three passes of each kind instead of a hundred.",
    seen="The first run was on a Hopper: all was 47.7 MiB too high, by its larger workspaces.",
)


def measured(run: str) -> dict[str, int]:
    """Measure every size in one process."""
    import torch

    torch.set_float32_matmul_precision("high")
    found: dict[str, int] = {}
    for width in WIDTHS:
        for length in LENGTHS:
            torch.cuda.empty_cache()
            before, peak = _sizes(length, width)
            name = f"{width} wide, {length} long"
            found |= {f"{name}, before backward": before, f"{name}, peak": peak}
    return found


def _sizes(length: int, width: int) -> tuple[int, int]:
    import torch

    given = inputs(length, width)
    order = torch.arange(length, device="cuda")
    mask = order.unsqueeze(0) >= order.unsqueeze(1)
    for _ in range(3):
        out = attention(*given, mask)
        loss = out.sum()
        loss.backward()
        _drop(given)
    for _ in range(3):
        out = attention(*given, mask)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        out = attention(*given, mask)
        loss = out.sum()
        loss.backward()
        _drop(given)
    return before, torch.cuda.max_memory_allocated()


def _drop(given: list[Any]) -> None:
    for tensor in given:
        tensor.grad = None
