"""Run the original notebook's loop and compare each figure with the one it published for an A100.

python benchmarks/side_by_side_published.py --peers peers --json results.json

Both libraries run in this process, in the notebook's order, because what the first one leaves in
the allocator affects the figures of the next one. The readings are the notebook's: the bytes of all
allocated blocks, which can be larger than what was requested.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from libraries import LIBRARIES, Library
from networks import images, resnet18
from processes import Row
from tqdm import tqdm

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.reports.files import write_whole
from pytest_cka_memory.units import MB


class Published(NamedTuple):
    """Two figures of the notebook's table, in MB."""

    peak: float
    retained: float


PUBLISHED = {
    "pytorch-cka 0.1.3": {
        64: Published(367.57, 9.12),
        128: Published(673.32, 0.0),
        256: Published(1306.60, 0.0),
        512: Published(2664.05, 0.0),
    },
    "torch-cka 0.21": {
        64: Published(387.35, 197.08),
        128: Published(719.83, 489.71),
        256: Published(1384.71, 1090.96),
        512: Published(2715.71, 2289.22),
    },
}
"""Library -> batch size -> what the notebook's run on an A100 with 80 GB printed."""
BATCH_SIZES = (64, 128, 256, 512)
SAMPLES = 1000
WORKSPACES_OF_THE_NOTEBOOK = {
    "TORCH_CUBLAS_WORKSPACE_CACHE": "1",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0",
}
"""The notebook's torch version kept these workspaces: the 9.12 MB that its first run retains."""


def measured(sizes: Sequence[int], device: torch.device, device_name: str) -> Iterator[Row]:
    """Measure both libraries with every batch size, in the notebook's order."""
    jobs = [(size, LIBRARIES[name]) for size in sizes for name in PUBLISHED]
    for size, library in (bar := tqdm(jobs)):
        bar.set_description(f"{library.name}, batches of {size}")
        yield {
            "library": library.name,
            "batch_size": size,
            "samples": SAMPLES,
            "device": device_name,
            "torch": str(torch.__version__),
            "cudnn": torch.backends.cudnn.version(),
            **_figures(library, size, device),
        }


def _figures(library: Library, batch_size: int, device: torch.device) -> dict[str, int]:
    """Return what the notebook's ``measure_memory_retention`` reads, in bytes."""
    _collect()
    model = resnet18().to(device).eval()
    loader = images(batch_size, SAMPLES)
    _collect()
    torch.cuda.reset_peak_memory_stats()
    before, requested_before = _allocated()
    library.compare(model, loader, device)
    _collect()
    after, requested_after = _allocated()
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "peak_requested_bytes": torch.cuda.memory_stats()["requested_bytes.all.peak"],
        "retained_bytes": after - before,
        "retained_requested_bytes": requested_after - requested_before,
    }


def _allocated() -> tuple[int, int]:
    """Bytes of the allocated blocks, and the bytes that were requested of them."""
    counters = torch.cuda.memory_stats()
    return counters["allocated_bytes.all.current"], counters["requested_bytes.all.current"]


def _collect() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def table(rows: Sequence[Row]) -> str:
    """Return each figure beside the published one."""
    lines = []
    for row in rows:
        published = PUBLISHED[row["library"]][row["batch_size"]]
        for kind, expected in published._asdict().items():
            found = row[f"{kind}_bytes"] / MB
            error = f"{found / expected - 1:+.2%}" if expected else "-"
            where = f"{row['library']:20}{row['batch_size']:>4} {kind:10}"
            lines.append(f"{where}{found:>9.2f} MB, published {expected:>8.2f} MB {error:>8}")
    return "\n".join(lines)


def main() -> None:
    """Measure all figures and print them beside the published ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True, help="the folder of --install")
    parser.add_argument(
        "--device", default="emulate:cuda:a100,values=off", help="or cuda, on an A100"
    )
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=int,
        default=list(BATCH_SIZES),
        choices=BATCH_SIZES,
        help="in this order; the notebook's order is ascending",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.update(WORKSPACES_OF_THE_NOTEBOOK)
    folders = [args.peers / (LIBRARIES[name].folder or "") for name in PUBLISHED]
    sys.path[:0] = [str(folder.resolve()) for folder in folders]  # before the bundled `cka`
    probe = MemoryProbe(args.device)
    rows = list(measured(args.batch_sizes, probe.device, probe.meter.device_name))
    print(table(rows))
    if args.json is not None:
        write_whole(args.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
