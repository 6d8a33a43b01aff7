"""The operators of torch's own database: what each of its samples asks a card for.

    python benchmarks/card/card_operators.py PART/PARTS LINES

Runs every PARTS-th operator on the card of this process, real or emulated, in single precision and
in bfloat16, forward and backward. Samples are made on the CPU from one seed, so that both cards get
the same numbers. Appends one line of JSON for each operator; a process that is started again goes
on behind the last one. Needs ``expecttest`` and ``scipy``.
"""

import gc
import json
import random
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from asked import requests
from card_family import ENDED
from opinfo import on, run

SAMPLES = 6
DTYPES = (torch.float32, torch.bfloat16)


def cases(operator: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, sample on the CPU, and whether it has a backward pass."""
    supported = operator.supported_dtypes("cpu") & operator.supported_dtypes("cuda")
    dtypes = [dtype for dtype in DTYPES if dtype in supported]
    for dtype in dtypes or sorted(supported, key=str)[-1:]:
        has_backward = operator.supports_autograd and (
            dtype in operator.supported_backward_dtypes("cpu")
        )
        random.seed(0)
        torch.manual_seed(0)
        samples = operator.sample_inputs("cpu", dtype, requires_grad=has_backward)
        for number, sample in zip(range(SAMPLES), samples, strict=False):
            yield f"{str(dtype).removeprefix('torch.')} {number}", sample, has_backward


def main() -> None:
    """Run one part of the operators."""
    part, parts = map(int, sys.argv[1].split("/"))
    path = Path(sys.argv[2])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from torch.testing._internal.common_methods_invocations import op_db

    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    done = {row.get("begin") or row.get("name") for row in map(json.loads, lines)}
    torch.cuda.init()
    gc.collect()
    gc.freeze()
    with path.open("a", encoding="utf-8") as file:
        for operator in op_db[part::parts]:
            name = f"{operator.name}.{operator.variant_test_name}".rstrip(".")
            if name in done:
                continue
            print(json.dumps({"begin": name}), file=file, flush=True)
            rows: dict[str, list[Any]] = {}
            try:
                for case, sample, has_backward in cases(operator):
                    moved = on(sample, operator, "cuda")
                    rows[case] = [requests(partial(run, operator, moved, "cuda", has_backward))]
                    del moved
            except Exception as error:
                rows["failed"] = [{"failed": f"{type(error).__name__}: {str(error)[:200]}"}]
            print(json.dumps({"name": name, "rows": rows}), file=file, flush=True)
            if any(word in str(rows) for word in ENDED):
                sys.exit(3)


if __name__ == "__main__":
    main()
