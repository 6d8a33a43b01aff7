"""What a function asks torch's allocator for: each request and each free, in order.

The same program reads it on a real card and on an emulated one, so that both can be compared event
by event.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

_BACKWARD_THREADS_S = 0.002
"""A thread of autograd drops what it used last shortly after the backward pass has returned."""
_KEPT = ("alloc", "free_requested", "segment_alloc", "segment_free", "segment_map", "segment_unmap")


def requests(*parts: Callable[[], Any], empty: bool = True) -> dict[str, Any]:
    """Run functions one after another; return what each of them asked for.

    Each function gets nothing; what it returns is kept until all have run, and is then freed.

    Args:
        parts: the functions.
        empty: whether the allocator's cache is emptied before.

    Returns:
        ``events`` (of each part, bytes of each request, negative for a free), ``peak`` and
        ``retained`` (bytes allocated above those at the start), ``reserved`` (bytes reserved at
        the end, above those at the start), ``segments`` (bytes of segments in order, negative for
        a release), and ``failed`` if a part raised an error.
    """
    gc.collect()
    torch.cuda.synchronize()
    if empty:
        torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {}
    kept, ends = [], []
    try:
        for part in parts:
            kept.append(part())
            torch.cuda.synchronize()
            time.sleep(_BACKWARD_THREADS_S)
            ends.append(_count())
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        error.__traceback__ = None
    found["peak"] = torch.cuda.max_memory_allocated() - allocated
    found["retained"] = torch.cuda.memory_allocated() - allocated
    found["reserved"] = torch.cuda.memory_reserved() - reserved
    found["peak_reserved"] = torch.cuda.max_memory_reserved() - reserved
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(None)
    kept.clear()
    signed = [
        (
            -event["size"] if "free" in event["action"] else event["size"],
            "segment" in event["action"],
        )
        for event in trace
        if event["action"] in _KEPT
    ]
    found["segments"] = [size for size, is_segment in signed if is_segment]
    found["events"] = [size for size, is_segment in signed if not is_segment]
    found["ends"] = ends
    return found


def _count() -> list[int]:
    """Return how many requests and frees there were since the process began."""
    stats = torch.cuda.memory_stats()
    return [stats["allocation.all.allocated"], stats["allocation.all.freed"]]
