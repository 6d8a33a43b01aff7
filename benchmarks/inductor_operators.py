"""Compile a sample of torch's own operators with Inductor, and compare their values with the CPU's.

python benchmarks/inductor_operators.py [NAME ...] [--count 300] [--keep FOLDER] [--json FILE]

The operators and their inputs are those of torch's database of operators, in single precision: so
many are drawn with a fixed seed. Each is compiled by ``torch.compile`` for an emulated card, runs
forward and backward, and is compared with the same operator on the CPU, which is not compiled. No
GPU is needed. Needs ``pip install expecttest scipy``.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from opinfo import compare

SEED = 32
SECONDS = 120
"""Of processor time, for each operator."""
RANDOM = ("dropout", "rand", "normal", "bernoulli", "multinomial", "exponential", "cauchy")
RANDOM += ("geometric", "rrelu", "uniform", "fractional_max_pool")
UNINITIALIZED = ("empty", "resize")


class TookTooLong(BaseException):
    """An operator has used its time."""


def work(names: list[str], lines: Path) -> None:
    """Append one line of JSON for each operator."""
    import emulated_cuda

    emulated_cuda.load("h100")
    import torch
    from torch._inductor import metrics
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _stop)
    with lines.open("a", encoding="utf-8") as file:
        for operator in op_db:
            name = name_of(operator)
            if name not in names:
                continue
            print(json.dumps({"begin": name}), file=file, flush=True)
            torch._dynamo.reset()
            metrics.reset()
            compiled = copy.copy(operator)
            compiled.op = partial(_compiled_on_the_device, operator.op, torch.compile(operator.op))
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                found = compare(compiled, torch.float32, 1, values=True)
                problems = found["problems"]
            except TookTooLong:
                problems, found = ["it took too long"], {"samples": 1}
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            row = {"name": name, "problems": problems, "samples": found["samples"]}
            row["kernels"] = metrics.generated_kernel_count
            row["seconds"] = round(time.process_time() - begun, 1)
            print(json.dumps(row), file=file, flush=True)


def _stop(*args: object) -> None:
    raise TookTooLong


def _compiled_on_the_device(
    eager: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    import torch

    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    on_device = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)
    return (compiled if on_device else eager)(*args, **kwargs)


def name_of(operator: Any) -> str:
    """Return the name of an operator and of its variant."""
    return f"{operator.name}.{operator.variant_test_name}".rstrip(".")


def drawn(count: int) -> list[str]:
    """Return the names of a sample of the operators that have single precision on both devices."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    names = {
        name_of(one)
        for one in op_db
        if torch.float32 in one.supported_dtypes("cpu") & one.supported_dtypes("cuda")
        and not any(word in one.name for word in (*RANDOM, *UNINITIALIZED))
    }
    return random.Random(SEED).sample(sorted(names), min(count, len(names)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="operators, in place of a sample")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=25, help="operators for each process")
    parser.add_argument("--keep", type=Path, help="a file for results, to continue a run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.names, options.work)
        return 0
    names = options.names or drawn(options.count)
    with tempfile.TemporaryDirectory() as folder:
        lines = options.keep or Path(folder) / "lines.jsonl"
        lines.touch()
        while left := [name for name in names if name not in results_in(lines)]:
            command = [sys.executable, __file__, "--work", str(lines), *left[: options.at_once]]
            ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
            if ended.returncode:
                note_crash(lines, ended.stderr)
        found = [results_in(lines)[name] for name in sorted(names)]
    wrong = [row for row in found if row["problems"]]
    for row in wrong:
        print(f"{row['name']}: {row['problems'][0]}")
    ran = [row for row in found if row["samples"]]
    print(f"{len(ran) - len(wrong)} of {len(ran)} operators have the CPU's values and gradients")
    print(Counter("with kernels" if row["kernels"] else "without kernels" for row in ran))
    if options.json:
        write(options.json, found)
    return int(bool(wrong))


def note_crash(lines: Path, error: str) -> None:
    """Note that the process has ended in the operator that it had begun.

    Raises:
        SystemExit: if it had begun none.
    """
    rows = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    if not rows or "begin" not in rows[-1]:
        raise SystemExit(error)
    row = {"name": rows[-1]["begin"], "problems": ["the process ended"], "samples": 1}
    with lines.open("a", encoding="utf-8") as file:
        print(json.dumps({**row, "kernels": 0, "seconds": 0}), file=file)


def results_in(lines: Path) -> dict[str, dict[str, Any]]:
    """Return operator -> what was found."""
    rows = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    return {row["name"]: row for row in rows if "name" in row}


def write(path: Path, found: list[dict[str, Any]]) -> None:
    """Write what was found, and with which versions."""
    import torch
    import triton

    data = {"torch": torch.__version__, "triton": triton.__version__, "card": "h100", "seed": SEED}
    data |= {"date": time.strftime("%Y-%m-%d"), "operators": found}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
