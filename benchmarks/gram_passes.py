"""What Gram matrices of a ResNet-18 cost if the activations are in the cache, and if they are not.

python benchmarks/gram_passes.py --json results.json

For the distinct outputs of one batch, it takes the CPU time of

- the forward pass and the comparison,
- the Gram matrices of outputs that were just read, so that as much of them as fits is in the cache,
- the same after other memory was read, so that nothing is in the cache,
- reading the outputs once from memory (their sum), which is what a second pass costs beside its
  arithmetic,
- the same number of operations as matrix products of torch, whose factors are in the cache.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conditions import processor
from networks import NETWORKS, images
from torch import Tensor

from cka import CKA
from cka.functional.features import as_rows
from cka.functional.kernels import linear_gram
from pytest_cka_memory.reports.files import write_whole

OTHER_BYTES = 256 * 2**20
"""More than the processor's caches."""


def outputs_of(model: torch.nn.Module, batch: Tensor) -> list[tuple[int, ...]]:
    """Return the shapes of the distinct outputs of all modules."""
    shapes: dict[tuple[int, int], tuple[int, ...]] = {}
    kept = []

    def hook(module: torch.nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output)
        shapes[id(output), output._version] = tuple(output.shape)  # in-place changes count

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    with torch.no_grad():
        model(batch)
    for handle in handles:
        handle.remove()
    return list(shapes.values())


def seconds(call: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Return the CPU time of a call, the shortest of three."""
    times = []
    for _ in range(3):
        if before is not None:
            before()
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def measured(size: int) -> dict[str, Any]:
    """Return the times for one batch."""
    model = NETWORKS["resnet18"]().eval()
    loader = images(size, size)
    ((batch, _),) = loader
    other = torch.ones(OTHER_BYTES // 4)
    shapes = outputs_of(model, batch)
    warm = cold = read = 0.0
    operations = 0
    for shape in shapes:
        rows = as_rows(torch.randn(shape))
        operations += size * size * rows.shape[1]
        warm += seconds(lambda rows=rows: linear_gram(rows), before=rows.sum)
        cold += seconds(lambda rows=rows: linear_gram(rows), before=other.sum)
        read += seconds(rows.sum, before=other.sum)
    square = torch.randn(512, 512)
    product = seconds(lambda: [square @ square for _ in range(20)]) / 20
    with torch.no_grad():
        forward = statistics.median(seconds(lambda: model(batch)) for _ in range(3))
    cka = CKA(model, device="cpu")
    compared = statistics.median(
        seconds(lambda: cka.compare(loader, progress=False)) for _ in range(3)
    )
    return {
        "network": "resnet18",
        "batch_size": size,
        "outputs": len(shapes),
        "forward_seconds": forward,
        "compare_seconds": compared,
        "gram_in_cache_seconds": warm,
        "gram_not_in_cache_seconds": cold,
        "read_seconds": read,
        # Half of n² p multiplications and additions, because a Gram matrix is symmetric.
        "product_seconds": product * operations / 2 / 512**3,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "processor": processor(),
    }


def main() -> None:
    """Read the arguments, measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(size) for size in args.sizes]
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.json:
        write_whole(args.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
