"""Compares torch's CUDA caching allocator with its simulation, step by step, on an emulated card.

    python tests/benchmarks/allocator_steps.py --steps 200000 [--expandable] [--seed 0]

Each step allocates or frees at random, on one of three streams, or empties the cache, in both.
Then the bytes that are allocated, requested and reserved, and their peaks, must be the same.
Prints where they first differ, and exits with 1.

torch 2.9 takes the block at the lowest address among equal ones, and the simulation gives each new
segment a higher address. So does the emulated device, until it has handed out 256 GB of addresses:
with torch 2.9, the two can differ after some 70,000 steps.
"""

import argparse
import os
import random
import sys
import time

from pytest_cka_memory.core.cards import CONTEXT_BYTES
from pytest_cka_memory.emulated import loading
from pytest_cka_memory.errors import CapacityError
from pytest_cka_memory.meters.predicted.allocator import CachingAllocator
from pytest_cka_memory.meters.predicted.expandable_allocator import ExpandableAllocator

KIB, MIB = 2**10, 2**20
SIZES = (
    (1, 4 * KIB),
    (4 * KIB, MIB),
    (MIB - 512, MIB + 512),
    (MIB, 10 * MIB),
    (10 * MIB, 99 * MIB),
)
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class DifferenceError(Exception):
    """The allocator and the simulation do not agree."""


class Comparison:
    """Torch's allocator on the emulated device, and the simulation of it."""

    def __init__(self, seed: int, capacity: int, *, expandable: bool) -> None:
        import torch

        self._torch = torch
        self._random = random.Random(seed)
        allocator = ExpandableAllocator if expandable else CachingAllocator
        self._simulation = allocator(capacity)
        self._streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self._live: list[tuple[int, object]] = []
        self._most_live = 0
        self._steps = 0
        self.full = 0

    def step(self) -> None:
        """Do the same random thing with both, and compare."""
        if self._steps % 200 == 0:
            self._most_live = self._random.choice((5, 40, 400))
        self._steps += 1
        choice = self._random.random()
        if choice < 0.002:
            self._torch.cuda.empty_cache()
            self._simulation.empty_cache()
            done = "empty the cache"
        elif choice < 0.003:
            self._torch.cuda.reset_peak_memory_stats()
            self._simulation.reset_peak()
            done = "reset the peaks"
        elif self._live and (len(self._live) > self._most_live or choice < 0.4):
            address, block = self._live.pop(self._random.randrange(len(self._live)))
            self._torch.cuda.caching_allocator_delete(address)
            self._simulation.free(block)
            done = f"free {block.requested} bytes"
        else:
            size = self._random.randint(*self._random.choice(SIZES))
            stream = self._random.randrange(len(self._streams))
            done = f"allocate {size} bytes on stream {stream}"
            self._allocate(size, stream, done)
        self._compare(done)

    def _allocate(self, size: int, stream: int, done: str) -> None:
        try:
            allocate = self._torch.cuda.caching_allocator_alloc
            address = allocate(size, stream=self._streams[stream])
        except self._torch.cuda.OutOfMemoryError:
            address = None
        try:
            block = self._simulation.allocate(size, stream)
        except CapacityError:
            block = None
        if (address is None) != (block is None):
            raise DifferenceError(f"{done}: {'torch' if address is None else 'simulation'} is full")
        if address is None:
            self.full += 1
        else:
            self._live.append((address, block))

    def _compare(self, done: str) -> None:
        stats = self._torch._C._cuda_memoryStats(0)
        for kind in ("allocated", "requested", "reserved"):
            real = stats[f"{kind}_bytes"]["all"]
            level = getattr(self._simulation, kind)
            if (real["current"], real["peak"]) != (level.current, level.peak):
                raise DifferenceError(
                    f"{done}: {kind} bytes {real['current']} (peak {real['peak']}) of torch, "
                    f"{level.current} (peak {level.peak}) of the simulation"
                )


def main() -> int:
    """Compare as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capacity-mb", type=int, default=1024)
    parser.add_argument("--expandable", action="store_true")
    arguments = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # expandable segments warn when the card is full
    for name in SETTINGS:
        os.environ.pop(name, None)
    if arguments.expandable:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    capacity = arguments.capacity_mb * MIB
    loading.load(total_bytes=capacity + CONTEXT_BYTES, values=False)
    comparison = Comparison(arguments.seed, capacity, expandable=arguments.expandable)
    started = time.perf_counter()
    for number in range(arguments.steps):
        try:
            comparison.step()
        except DifferenceError as difference:
            print(f"step {number}: {difference}")
            return 1
    seconds = time.perf_counter() - started
    print(f"{arguments.steps} steps, {comparison.full} of them out of memory: no difference")
    print(f"{seconds:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
