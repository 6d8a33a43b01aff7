"""Attention without heads, eager and compiled, as a student's own program measures it."""

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
COMPILED = """
0.020 0.025 0.053 0.123 0.562 1.649 2.181 6.501 8.641 25.871
0.020 0.026 0.055 0.128 0.571 1.670 2.198 6.543 8.674 25.955
0.021 0.029 0.059 0.139 0.587 1.712 2.232 6.627 8.741 26.122
0.023 0.034 0.067 0.160 0.621 1.795 2.299 6.795 8.875 34.847
"""
KINDS = {"eager": (EAGER, "operators"), "compiled": (COMPILED, "compiled")}


def _name(how: str, width: int, length: int, counts: str) -> str:
    return f"{how}, {width} wide, {length} long, {counts}"


def _figures() -> dict[str, Figure]:
    found = {}
    for how, (text, kind) in KINDS.items():
        for width, row in zip(WIDTHS, table(text), strict=True):
            for index, length in enumerate(LENGTHS):
                before, peak = row[2 * index : 2 * index + 2]
                name = _name(how, width, length, "before backward")
                found[name] = Figure(before, "GB", "allocated", kind)
                found[_name(how, width, length, "peak")] = Figure(peak, "GB", kind=kind)
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
    runs=tuple(KINDS),
    program="GAOYUEtianc/Stanford-CS336-assignments@f06a68cece06a5949eadc8912c9e09aa723d28ce",
    parts=("assignment1", "assignment2-systems/benchmark_attention.py"),
    differs="The source's own program, with three passes of each kind instead of ten and 100.",
)


def measured(run: str) -> dict[str, int]:
    """Run the part of the program that measures."""
    program = _own_program.script("assignment2-systems/benchmark_attention.py")
    program["benchmark_attention"].__defaults__ = (3, 3, "cuda")
    found = {}
    for row in program["run_benchmarks"](use_compile=run == "compiled"):
        counts = {"memory_before_backward_gb": "before backward", "peak_memory_gb": "peak"}
        for key, name in counts.items():
            size = round(row[key] * 10**9)
            found[_name(run, row["d_model"], row["seq_len"], name)] = size
    return found
