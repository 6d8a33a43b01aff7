"""The tables of what compiled code on the emulated device was compared with."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MB = 2**20
Row = dict[str, Any]


def functions() -> str:
    """Differences from the CPU, and peaks, of compiled functions and training runs."""
    head = ["compiled", "largest difference", "peak, bytes", "reserve, bytes"]
    return _markdown(
        [*head, "seconds, caches cold", "warm"],
        [
            [
                row["name"],
                f"{row['difference']:.1e}",
                *(f"{figure:,}" for figure in row["peak_and_reserve"]),
                *(f"{row[key]:.1f}" for key in ("seconds_cold", "seconds_warm")),
            ]
            for row in _result("compiled-functions-torch-*.json")["rows"]
        ],
    )


def cost() -> str:
    """What launches take beside the same arithmetic in torch on the CPU."""
    return _markdown(
        [
            *("kernel", "programs", "torch on the CPU, ms", "twice that and 5 ms", "launch, ms"),
            "memory, MB",
        ],
        [
            [
                row["name"],
                f"{row['programs']:,}",
                f"{row['cpu_ms']:.2f}",
                f"{2 * row['cpu_ms'] + 5:.2f}",
                f"{row['launch_ms']:.2f}",
                f"{row['memory_bytes'] / MB:.1f}",
            ]
            for row in _result("compiled-cost-torch-*.json")
        ],
    )


def hostile() -> str:
    """How programs whose compiled code goes wrong ended."""
    found: dict[str, Row] = _result("compiled-hostile-torch-*.json")
    return _markdown(
        ["what goes wrong", "the program prints"],
        [[name, _printed(row["printed"])] for name, row in found.items()],
    )


def suites() -> str:
    """Outcomes of other projects' tests of Triton kernels."""
    rows = []
    for result in _results("triton-suites-torch-*.json"):
        for name, tests in result["suites"].items():
            counts = Counter(row["outcome"] for row in tests)
            ran = counts["passed"] + counts["failed"]
            rows.append(
                [
                    f"{name} `{result['commits'][name]}`",
                    str(result["torch"]).partition("+")[0],
                    f"{len(tests):,} of {tests[0]['of']:,}",
                    f"{counts['passed']:,} of {ran:,} ({100 * counts['passed'] / ran:.1f} %)",
                    *(str(counts[outcome]) for outcome in ("skipped", "too large", "too long")),
                ]
            )
    head = ["suite", "PyTorch", "tests drawn", "passed", "skipped by the suite"]
    return _markdown([*head, "need more memory", "need more time"], rows)


def operators() -> str:
    """How torch's operators end that Inductor has compiled, by whether kernels were written."""
    found: list[Row] = _result("inductor-operators-torch-*.json")["operators"]
    rows = []
    for name, has_kernels in (("Inductor wrote kernels", True), ("it calls others", False)):
        those = [row for row in found if row["samples"] and bool(row["kernels"]) is has_kernels]
        right = sum(not row["problems"] for row in those)
        rows.append([name, f"{right} of {len(those)}"])
    return _markdown(["operators of which", "have the CPU's values and gradients"], rows)


def _printed(lines: list[str]) -> str:
    lines = [line for line in lines if not line.startswith("after it")] or lines
    text = lines[-1].strip().replace("|", "/").replace("`", "'")
    return f"`{text}`"


def _result(pattern: str) -> Any:
    (found,) = _results(pattern)
    return found


def _results(pattern: str) -> list[Any]:
    files = sorted(RESULTS.glob(pattern), key=_numbers, reverse=True)  # newest version first
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _numbers(file: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", file.name)]


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
