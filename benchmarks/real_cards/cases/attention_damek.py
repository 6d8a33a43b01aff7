"""Attention of growing lengths, eager and compiled, where cuBLAS has a workspace of 8.125 MiB."""

from typing import Any

from _attention import LENGTHS, WIDTHS, attention, inputs, table
from case import CUBLAS_BEFORE_2_7, Case, Figure

COUNTED = {
    "after inputs": "allocated",
    "before backward": "allocated",
    "forward peak": "peak allocated",
    "backward peak": "peak allocated",
}
# Width, length, how it ran; then MiB in the order of COUNTED.
PUBLISHED = """
16 256 eager 16.7505 20.7739 24.7739 33.0483
16 256 compiled 16.7505 20.7817 20.9072 29.064
16 1024 eager 18.2505 82.3442 146.344 275.439
16 1024 compiled 18.2505 82.3755 82.877 211.501
16 4096 eager 24.2505 1048.63 2072.63 4125
16 4096 compiled 24.2505 1048.75 1050.75 3101.25
16 8192 eager 32.2505 4129 8225 16425.8
16 8192 compiled 32.2505 4129.25 4133.25 12330.3
16 16384 eager 48.2505 16433.8 32817.8 65603.3
16 16384 compiled 48.2505 16434.3 16442.3 49220.3
32 256 eager 17.2505 21.2739 25.2739 33.7983
32 256 compiled 17.2505 21.2817 21.5322 29.814
32 1024 eager 20.2505 84.3442 148.344 278.439
32 1024 compiled 20.2505 84.3755 85.377 214.501
32 4096 eager 32.2505 1056.63 2080.63 4137
32 4096 compiled 32.2505 1056.75 1060.75 3113.25
32 8192 eager 48.2505 4145 8241 16449.8
32 8192 compiled 48.2505 4145.25 4153.25 12354.3
32 16384 eager 80.2505 16465.8 32849.8 65651.3
32 16384 compiled 80.2505 16466.3 16482.3 49268.3
64 256 eager 18.2505 22.2739 26.2739 35.2983
64 256 compiled 18.2505 22.2817 22.7832 31.314
64 1024 eager 24.2505 88.3442 152.344 284.439
64 1024 compiled 24.2505 88.3755 90.377 220.501
64 4096 eager 48.2505 1072.63 2096.63 4161
64 4096 compiled 48.2505 1072.75 1080.75 3137.25
64 8192 eager 80.2505 4177 8273 16497.8
64 8192 compiled 80.2505 4177.25 4193.25 12402.3
64 16384 eager 144.25 16529.8 32913.8 65747.3
64 16384 compiled 144.25 16530.3 16562.3 49364.3
128 256 eager 20.2505 24.2739 28.2739 38.2983
128 256 compiled 20.2505 24.2817 25.2832 34.314
128 1024 eager 32.2505 96.3442 160.344 296.439
128 1024 compiled 32.2505 96.3755 100.377 232.501
128 4096 eager 80.2505 1104.63 2128.63 4209
128 4096 compiled 80.2505 1104.75 1120.75 3185.25
128 8192 eager 144.25 4241 8337 16593.8
128 8192 compiled 144.25 4241.25 4273.25 12498.3
128 16384 eager 272.25 16657.8 33041.8 65939.3
128 16384 compiled 272.25 16658.3 16722.3 49556.3
"""


def _figures() -> dict[str, Figure]:
    return {
        f"{how}, {width} wide, {length} long, {name}": Figure(
            printed, "MiB", counts, kind="compiled" if how == "compiled" else "operators"
        )
        for width, length, how, *cells in table(PUBLISHED)
        for (name, counts), printed in zip(COUNTED.items(), cells, strict=True)
    }


CASE = Case(
    title="Attention without heads, batch 8, float32",
    source="https://github.com/damek/cs336-assignment2-systems/blob/main/cs336_systems/outputs/attention_benchmark.md",
    kind="operators",
    card="a100",
    real="not named; torch 2.6.0 (uv.lock). Its workspaces are those of an A100",
    torch="2.6",
    figures=_figures(),
    environment=CUBLAS_BEFORE_2_7,
    differs=(
        "Three passes of each kind instead of a hundred. The first version of this program kept "
        "another intermediate result in a variable than the source does: its eager forward peaks "
        "were too high by one output."
    ),
)
REPEATED = 3


def measured(run: str) -> dict[str, int]:
    """Measure every size in one process, as the source does: narrow first, then short first."""
    found: dict[str, int] = {}
    for width in WIDTHS:
        for length in LENGTHS:
            for how in ("eager", "compiled"):
                for name, size in _sizes(width, length, how == "compiled").items():
                    found[f"{how}, {width} wide, {length} long, {name}"] = size
    return found


def _sizes(width: int, length: int, compiled: bool) -> dict[str, int]:
    import torch

    function: Any = torch.compile(attention) if compiled else attention
    torch.cuda.empty_cache()
    given = inputs(length, width)
    for _ in range(REPEATED):
        out = function(*given)
        loss = out.sum()
        loss.backward()
        _drop(given)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(REPEATED):
        function(*given).sum()
    sizes = {"forward peak": torch.cuda.max_memory_allocated()}
    sizes["after inputs"] = torch.cuda.memory_allocated()
    out = function(*given)
    loss = out.sum()
    sizes["before backward"] = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(REPEATED):
        _step(function, given)
    del loss
    return {**sizes, "backward peak": torch.cuda.max_memory_allocated()}


def _step(function: Any, given: list[Any]) -> None:
    out = function(*given)
    loss = out.sum()
    loss.backward()
    _drop(given)


def _drop(given: list[Any]) -> None:
    for tensor in given:
        tensor.grad = None
