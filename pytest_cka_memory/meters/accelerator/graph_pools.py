"""Where the CUDA graphs were captured that take their memory from a pool of the allocator.

A graph takes its memory from a pool of its own, or from one that the user shares between graphs.
What a pool has reserved goes back to the device only after its last graph was deleted.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_cka_memory.core.allocations import RawFrames, format_frames, user_frames
from pytest_cka_memory.meters.patching import Patch, SharedPatches

PoolId = tuple[int, ...]
"""Of one of the allocator's pools, as ``torch.cuda.CUDAGraph.pool`` returns it."""
NO_POOL: PoolId = (0, 0)
"""What is taken from the pool of no graph."""
ADVICE = (
    "a pool keeps what it has reserved until its last graph is deleted: delete the graph, capture "
    "graphs that never run at once into one pool, or call torch.compiler.reset() if "
    "torch.compile has captured it"
)
_captured_at: dict[PoolId, RawFrames] = {}
"""Of each pool, the user's frames of its first capture. The allocator uses no number again."""


class Captures(SharedPatches):
    """Notes where graphs are captured, while started. Graphs from before are not known."""

    def make_patches(self) -> Iterator[Patch]:
        yield self.patch(torch.cuda.CUDAGraph, "capture_end", _noting)


def _noting(capture_end: Callable[..., Any]) -> Callable[..., Any]:
    def end_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = capture_end(self, *args, **kwargs)
        _captured_at.setdefault(tuple(self.pool()), user_frames())
        return result

    return end_and_note


def owner_of(pool: PoolId) -> str | None:
    """Return what holds the memory of a pool, in words; None for that of no graph."""
    if pool == NO_POOL:
        return None
    frames = format_frames(_captured_at.get(pool, ()))
    return (
        f"the pool of the graph captured at {frames[0]}" if frames else "the pool of a CUDA graph"
    )
