"""Attention on a small card, eager and compiled, as far as it fitted."""

from typing import Any

from _attention import attention, inputs, table
from case import CUBLAS_BEFORE_2_7, Case, Figure

# How it ran, width, length, MiB before the backward pass.
PUBLISHED = """
eager 16 256 20.77392578125
eager 16 1024 82.34423828125
eager 32 256 21.27392578125
eager 32 1024 84.34423828125
eager 64 256 22.27392578125
eager 64 1024 88.34423828125
eager 128 256 24.27392578125
eager 128 1024 96.34423828125
compiled 16 256 20.78173828125
compiled 16 1024 82.37548828125
compiled 16 4096 1048.75048828125
compiled 32 256 21.28173828125
compiled 32 1024 84.37548828125
compiled 64 256 22.28173828125
compiled 64 1024 88.37548828125
compiled 128 256 24.28173828125
compiled 128 1024 96.37548828125
"""

CASE = Case(
    title="Attention without heads, batch 8, float32, on a small card",
    source="https://github.com/silmont2000/assignment2-systems",
    kind="operators",
    card="rtx4090",
    real="not named, with less than 5 GB; torch 2.6.0 (uv.lock)",
    torch="2.6",
    figures={
        f"{how}, {width} wide, {length} long": Figure(
            printed, "MiB", "allocated", kind="compiled" if how == "compiled" else "operators"
        )
        for how, width, length, printed in table(PUBLISHED)
    },
    runs=("eager", "compiled"),
    environment=CUBLAS_BEFORE_2_7,
    differs="Three passes of each kind; sizes that did not fit the source's card are left out.",
)


def measured(run: str) -> dict[str, int]:
    """Measure the sizes that fitted, in one process."""
    import torch

    function: Any = torch.compile(attention) if run == "compiled" else attention
    found: dict[str, int] = {}
    for how, width, length, _ in table(PUBLISHED):
        if how != run:
            continue
        given = inputs(int(length), int(width))
        for _ in range(3):
            output = function(*given)
            loss = output.sum()
            loss.backward()
        _drop(given)
        torch.cuda.empty_cache()
        for _ in range(3):
            output = function(*given)
        output = function(*given)
        found[f"{run}, {width} wide, {length} long"] = torch.cuda.memory_allocated()
        for _ in range(3):
            output = function(*given)
            loss = output.sum()
            loss.backward()
            _drop(given)
    return found


def _drop(given: list[Any]) -> None:
    for tensor in given:
        tensor.grad = None
