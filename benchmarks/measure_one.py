"""Measure one library on one network at one batch size; prints one line of JSON.

Each measurement has its own process, so that import names and the state of the allocator do not
affect the next one. The bare forward pass is measured in the same process, and the timings of both
alternate.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from libraries import AS_THE_NOTEBOOK, LIBRARIES
from networks import NETWORKS, images
from torch import nn

from pytest_cka_memory import MemoryProbe


def forward(model: nn.Module, loader: Iterable[Any], device: torch.device) -> None:
    """Run the network over the data without keeping any result."""
    with torch.no_grad():
        for batch, _ in loader:
            model(batch.to(device))


class Times(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float
    """Of all threads; on a busy machine it varies less than the wall time."""


def seconds(call: Callable[[], object]) -> Times:
    """Return the time of one call, including its kernels on the device."""
    start, cpu_start = time.perf_counter(), time.process_time()
    call()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return Times(time.perf_counter() - start, time.process_time() - cpu_start)


def timings(times: Sequence[tuple[Times, Times]]) -> dict[str, float]:
    """Return medians over pairs of (bare forward, library); nothing if there are no pairs."""
    if not times:
        return {}
    return {
        "repeat": len(times),
        "forward_seconds": statistics.median(alone.wall for alone, _ in times),
        "seconds": statistics.median(whole.wall for _, whole in times),
        "time_ratio": statistics.median(whole.wall / alone.wall for alone, whole in times),
        "cpu_time_ratio": statistics.median(whole.cpu / alone.cpu for alone, whole in times),
    }


def main() -> None:
    """Read the arguments, measure memory once, and time several calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=[*LIBRARIES, AS_THE_NOTEBOOK.name])
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("batch_size", type=int)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument(
        "--repeat", type=int, default=3, help="how often each call is timed; 0 for never"
    )
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()

    probe = MemoryProbe(args.device)
    model = NETWORKS[args.network]().to(probe.device).eval()
    loader = images(args.batch_size, args.samples)
    compare = LIBRARIES.get(args.library, AS_THE_NOTEBOOK).compare

    bare = probe.run(forward, model, loader, probe.device)
    with probe.measure() as region:
        compare(model, region.batches(loader), probe.device)

    times: list[tuple[Times, Times]] = []
    for _ in range(args.repeat):
        alone = seconds(lambda: forward(model, loader, probe.device))
        times.append((alone, seconds(lambda: compare(model, loader, probe.device))))
    figures = {
        "device": probe.meter.device_name,
        "meter": probe.meter.name,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "samples": args.samples,
        "batches": len(loader),
        "forward_peak_increase_bytes": bare.peak_increase_bytes,
        "peak_bytes": region.peak_bytes,
        "peak_increase_bytes": region.peak_increase_bytes,
        "peak_ratio": region.peak_increase_bytes / bare.peak_increase_bytes,
        "retained_bytes": region.retained_bytes,
        "growth_bytes_per_batch": region.growth_bytes_per_batch,
        **timings(times),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
