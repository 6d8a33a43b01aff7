"""Measure what a launch of a Triton kernel costs on the emulated device.

python benchmarks/compiled_cost.py [--repeats 20] [--json results.json]

Each kernel is launched on the emulated device, and in turn with it torch does the same arithmetic
on the CPU, both on one thread. Times are medians of the processor time of several calls, so that a
busy machine matters little. Memory is what the process takes at most during a launch beside what
it has before, as Linux counts it: the tensors are allocated and written before. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import emulated_cuda

MB = 2**20


class Kernel(NamedTuple):
    """A launch and the same arithmetic.

    Attributes:
        launch: of the kernel, on the emulated device.
        on_cpu: what torch does with the same inputs on the CPU.
        programs: how many.
    """

    launch: Callable[[], Any]
    on_cpu: Callable[[], Any]
    programs: int


def kernels() -> dict[str, Kernel]:
    """Return name -> launch and arithmetic."""
    import compiled_cost_kernels as k
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    few, many = torch.rand(64), torch.rand(2**22)
    rows, square = torch.rand(2048, 1024), torch.rand(512, 512)
    short, q = torch.rand(1024, 256), torch.rand(8, 512, 64)
    numbers = torch.randint(64, (2**18,), dtype=torch.int32)
    places = torch.randint(8192, (4096,))
    sums, counts = torch.zeros(2048), torch.zeros(64, dtype=torch.int32, device="cuda")

    def cuda(x: Any) -> Any:
        return x.to("cuda")

    few_, many_, rows_, square_ = map(cuda, (few, many, rows, square))
    short_, q_, numbers_, sums_, places_ = map(cuda, (short, q, numbers, sums, places))
    inputs = few_, many_, rows_, square_, short_, q_
    out = {one.data_ptr(): torch.zeros_like(one) for one in inputs}

    def to(x: Any) -> Any:
        return out[x.data_ptr()]

    attention = torch.nn.functional.scaled_dot_product_attention
    return {
        "sum of two tensors, 64 elements": Kernel(
            lambda: k.add[(1,)](to(few_), few_, few_, 64, SIZE=64), lambda: few + few, 1
        ),
        "sum of two tensors, 4,194,304 elements": Kernel(
            lambda: k.add[(4096,)](to(many_), many_, many_, 2**22, SIZE=1024),
            lambda: many + many,
            4096,
        ),
        "GELU, 4,194,304 elements": Kernel(
            lambda: k.gelu[(4096,)](to(many_), many_, 2**22, SIZE=1024),
            lambda: torch.nn.functional.gelu(many),
            4096,
        ),
        "softmax, 2048 x 1024": Kernel(
            lambda: k.softmax[(2048,)](to(rows_), rows_, 1024, SIZE=1024),
            lambda: rows.softmax(1),
            2048,
        ),
        "layer norm, 2048 x 1024": Kernel(
            lambda: k.layer_norm[(2048,)](to(rows_), rows_, 1024, 1e-5, SIZE=1024),
            lambda: torch.nn.functional.layer_norm(rows, (1024,)),
            2048,
        ),
        "sums of rows, 2048 x 1024": Kernel(
            lambda: k.sum_rows[(2048,)](sums_, rows_, 1024, SIZE=1024), lambda: rows.sum(1), 2048
        ),
        "product, 512 x 512 x 512": Kernel(
            lambda: k.product[(8, 8)](to(square_), square_, square_, 512, SIZE=64, STEP=32),
            lambda: square @ square,
            64,
        ),
        "sort, 1024 x 256": Kernel(
            lambda: k.sort[(1024,)](to(short_), short_, SIZE=256), lambda: short.sort(1), 1024
        ),
        "attention, 8 heads of 512 x 64": Kernel(
            lambda: k.attention[(8, 8)](to(q_), q_, q_, q_, 512, 0.125, ROWS=64, WIDTH=64),
            lambda: attention(q[None], q[None], q[None], scale=0.125),
            64,
        ),
        "counts by atomic additions, 262,144 numbers": Kernel(
            lambda: k.count[(256,)](counts, numbers_, SIZE=1024),
            lambda: torch.bincount(numbers, minlength=64),
            256,
        ),
        "rows by their numbers, 4096 x 256": Kernel(
            lambda: k.take[(1024,)](to(many_), rows_, places_, SIZE=1024, WIDTH=256),
            lambda: rows.view(-1, 256)[places],
            1024,
        ),
        "dropout, 4,194,304 elements": Kernel(
            lambda: k.dropout[(4096,)](to(many_), many_, 2**22, 0.5, 7, SIZE=1024),
            lambda: torch.nn.functional.dropout(many, 0.5),
            4096,
        ),
    }


def median_ms(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the median of the processor time of each call; the calls take turns."""
    found: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, times in zip(calls, found, strict=True):
            begun = time.process_time()
            call()
            if repeat:  # the first call warms up
                times.append(1000 * (time.process_time() - begun))
    return [statistics.median(times) for times in found]


def memory_beside(call: Callable[[], Any]) -> int:
    """Return the bytes that the process takes at most during a call beside those before."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier launches have freed
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins again
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> int:
    """Print a row for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    emulated_cuda.load("a100")
    rows = []
    for name, kernel in kernels().items():
        kernel.launch()  # compiles it, and writes its tensors
        memory_bytes = memory_beside(kernel.launch)
        launch_ms, cpu_ms = median_ms([kernel.launch, kernel.on_cpu], options.repeats)
        row = {
            "name": name,
            "programs": kernel.programs,
            "memory_bytes": memory_bytes,
            "launch_ms": round(launch_ms, 2),
            "cpu_ms": round(cpu_ms, 2),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
