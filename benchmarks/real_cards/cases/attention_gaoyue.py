"""Attention without heads, as a student's own program measures it."""

import _own_program
from _attention import LENGTHS, WIDTHS, table
from case import Case, Figure

# For each width and length: allocated before the backward pass, then the peak; GB of 10**9 bytes.
EAGER = """
0.020 0.026 0.053 0.155 0.562 2.179 2.181 8.636 8.641 34.435
0.020 0.027 0.055 0.159 0.571 2.194 2.198 8.666 8.674 34.494
0.021 0.029 0.059 0.166 0.587 2.223 2.232 8.724 8.741 34.612
0.023 0.033 0.067 0.181 0.621 2.282 2.299 8.842 8.875 34.847
"""


def _name(width: int, length: int, counts: str) -> str:
    return f"{width} wide, {length} long, {counts}"


def _figures() -> dict[str, Figure]:
    found = {}
    for width, row in zip(WIDTHS, table(EAGER), strict=True):
        for index, length in enumerate(LENGTHS):
            before, peak = row[2 * index : 2 * index + 2]
            found[_name(width, length, "before backward")] = Figure(before, "GB", "allocated")
            found[_name(width, length, "peak")] = Figure(peak, "GB")
    return found


CASE = Case(
    title="Attention without heads, batch 8, float32, as a student's own program has it",
    source=(
        "https://github.com/GAOYUEtianc/Stanford-CS336-assignments/blob/main/"
        "assignment2-systems/answers.md"
    ),
    kind="operators",
    card="a100",
    real="A100 80GB PCIe; torch 2.6.0 (uv.lock)",
    torch="2.6",
    figures=_figures(),
    programs={
        "GAOYUEtianc/Stanford-CS336-assignments@f06a68cece06a5949eadc8912c9e09aa723d28ce": (
            "assignment1",
            "assignment2-systems/benchmark_attention.py",
        )
    },
    differs=(
        "The source's own program, with three passes of each kind instead of ten and 100. Its "
        "compiled rows are left out: Dynamo of torch 2.9 leaves a function with ranges of NVTX as "
        "it is, so the peaks would be those of the other rows, 5 to 33 % above; Triton of torch "
        "2.6 does not run on an emulated card."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Run the part of the program that measures."""
    program = _own_program.script("assignment2-systems/benchmark_attention.py")
    program["benchmark_attention"].__defaults__ = (3, 3, "cuda")
    found = {}
    for row in program["run_benchmarks"](use_compile=False):
        counts = {"memory_before_backward_gb": "before backward", "peak_memory_gb": "peak"}
        for key, name in counts.items():
            size = round(row[key] * 10**9)
            found[_name(row["d_model"], row["seq_len"], name)] = size
    return found
