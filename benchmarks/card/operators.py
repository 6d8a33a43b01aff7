"""Every operator of torch's own database, and layers at sizes of practice: what each asks for.

    python benchmarks/card/operators.py (opinfo | shapes) SHARD COUNT LINES

Runs on the card of this process, real or emulated, and appends one line of JSON for each operator.
"""

import contextlib
import functools
import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import opinfo
from asked import digest, requests

SAMPLES = 8
DTYPES = (torch.float32, torch.bfloat16)
_ENDED = ("device-side assert", "illegal memory", "misaligned address", "CUBLAS_STATUS_EXECUTION")


def of_database(shard: int, count: int, lines: Any, done: set[str]) -> None:
    """Run samples of each operator, forward and backward."""
    from torch.testing._internal.common_methods_invocations import op_db

    for number, operator in enumerate(op_db):
        key = f"{operator.name}.{operator.variant_test_name}".rstrip(".")
        if number % count != shard or key in done:
            continue
        print(json.dumps({"begin": key}), file=lines, flush=True)
        rows = {}
        supported = operator.supported_dtypes("cpu") & operator.supported_dtypes("cuda")
        chosen = [dtype for dtype in DTYPES if dtype in supported]
        others = operator.supported_dtypes("cpu") or operator.supported_dtypes("cuda")
        for dtype in chosen or sorted(others, key=str)[-1:]:
            rows[str(dtype)] = _samples(operator, dtype)
        print(json.dumps({"name": key, "rows": rows}), file=lines, flush=True)
        if any(word in str(rows) for word in _ENDED):
            sys.exit(3)  # the context is lost; the next process goes on


def _samples(operator: Any, dtype: torch.dtype) -> list[dict[str, Any]]:
    differentiable = operator.supports_autograd and dtype in operator.supported_backward_dtypes(
        "cpu"
    )
    torch.manual_seed(0)
    inputs = []
    with contextlib.suppress(Exception):
        for sample in operator.sample_inputs("cpu", dtype, requires_grad=differentiable):
            inputs.append(sample)
            if len(inputs) == SAMPLES:
                break
    rows = []
    for sample in inputs:
        try:
            moved = opinfo.on(sample, operator, "cuda")
        except Exception as error:
            rows.append({"failed": f"moving: {type(error).__name__}: {str(error)[:200]}"})
            continue
        run = functools.partial(opinfo.run, operator, moved, "cuda", differentiable)
        rows.append(requests(run, look=_values))
        del run
        del moved
    return rows


def _values(kept: Any) -> Any:
    try:
        return digest(kept)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"


def of_shapes(shard: int, count: int, lines: Any, done: set[str]) -> None:
    """Run layers and functions at sizes of practice, forward and backward."""
    import shapes

    for number, (family, cases) in enumerate(shapes.FAMILIES.items()):
        if number % count != shard:
            continue
        for key, make in cases():
            name = f"{family}: {key}"
            if name in done:
                continue
            print(json.dumps({"begin": name}), file=lines, flush=True)
            try:
                parts = make()
                row = requests(*parts)
                del parts
            except Exception as error:
                row = {"failed": f"making: {type(error).__name__}: {str(error)[:200]}"}
            print(json.dumps({"name": name, "rows": {"": [row]}}), file=lines, flush=True)
            if any(word in str(row.get("failed")) for word in _ENDED):
                sys.exit(3)


def main() -> None:
    """Run one shard."""
    what, shard, count, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    done = set()
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            done.add(row.get("begin") or row.get("name"))
    torch.cuda.init()
    gc.collect()
    gc.freeze()
    with path.open("a", encoding="utf-8") as lines:
        {"opinfo": of_database, "shapes": of_shapes}[what](shard, count, lines, done)
        print(json.dumps({"end": True}), file=lines, flush=True)


if __name__ == "__main__":
    main()
