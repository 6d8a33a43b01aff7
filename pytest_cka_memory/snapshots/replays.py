"""Replays a recording on an emulated card, by torch's own allocator, and compares the reserve."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from emulated_cuda import replaying
from emulated_cuda.packing import packed, unpacked
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.snapshots.reading import ALLOC, Device
from pytest_cka_memory.snapshots.request_list import Requests, layout_of, recorded_reserve

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
UNLIMITED_BYTES = 2**39
"""Memory of a card that no recording fills."""


@dataclass(frozen=True)
class Refused:
    """The allocation for which a card had no memory."""

    event: int
    bytes: int
    free_bytes: int
    """What the card had left, beside the allocator's reserve."""


@dataclass(frozen=True)
class Replayed:
    """What one run took."""

    settings: str
    total_bytes: int
    """Memory of the card, with its CUDA context."""
    error: str
    """Why there are no figures; empty if there are."""
    allocated_bytes: int = 0
    """The most that was in use."""
    reserved_bytes: int = 0
    """The most that the allocator had from the card."""
    end_reserved_bytes: int = 0
    device_calls: int = 0
    """How many times the allocator asked the card for memory: ``cudaMalloc`` or ``cuMemMap``."""
    device_frees: int = 0
    """How many times it gave memory back to the card."""
    refused: Refused | None = None
    seconds: float = 0.0
    at: array[int] | None = None
    """Numbers of the requests that changed the reserve."""
    levels: array[int] | None = None
    """The reserve after them."""
    layout: Sequence[Any] = ()
    """Segments at the recording's beginning, as :func:`emulated_cuda.replaying` returns them."""
    streams_reused: bool = False
    refused_positions: int = 0
    """Segments that could not be where the recording has them."""
    ignored_positions: bool = False
    """Whether the allocator chooses among segments by something else than where they are."""


class Run(NamedTuple):
    """How requests are replayed once."""

    settings: str
    """Text of ``PYTORCH_ALLOC_CONF``; empty for torch's default."""
    attempts: bool = True
    """Whether to try allocations that were refused when they were recorded."""
    releases: bool = False
    """Whether to release the cache where the recording's card was full."""
    positioned: bool = False
    """Whether new segments are in the order of addresses that the recording's card gave them."""
    emptied: tuple[int, ...] = ()
    """Numbers of requests before which the cache is emptied."""


def run(
    request_list: Requests, runs: Sequence[Run], *, total_bytes: int = UNLIMITED_BYTES
) -> list[Replayed]:
    """Replay requests on an emulated card, several times.

    Args:
        request_list: what is replayed.
        runs: the settings of each replay.
        total_bytes: memory of the card. The CUDA context takes 512 MB of it.

    Raises:
        ReportError: if no card can be emulated here.
    """
    if not runs:
        return []
    rows = [each._asdict() for each in runs]
    job = {"requests": request_list.as_data(), "runs": rows, "total_bytes": total_bytes}
    return [
        _replayed(each.settings, total_bytes, request_list, result)
        for each, result in zip(runs, _results(job), strict=True)
    ]


def _results(job: dict[str, Any]) -> list[dict[str, Any]]:
    environment = {name: text for name, text in os.environ.items() if name not in _VARIABLES}
    environment.pop("EMULATED_CUDA", None)  # of a process that emulates another card
    environment["CUDA_VISIBLE_DEVICES"] = "0"
    with tempfile.TemporaryDirectory(prefix="pytest-cka-memory-replay-") as folder:
        source, target = Path(folder, "job"), Path(folder, "results")
        source.write_bytes(packed(job))
        done = subprocess.run(
            [sys.executable, "-m", replaying.__name__, str(source), str(target)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode or not target.exists():
            lines = done.stderr.strip().splitlines()
            reason = (
                lines[-1]
                if lines
                else (f"the process of the replay ended with status {done.returncode}")
            )
            raise ReportError(f"cannot replay here: {reason}")
        results: list[dict[str, Any]] = unpacked(target.read_bytes())
    return results


def _replayed(
    settings: str, total_bytes: int, request_list: Requests, result: Mapping[str, Any]
) -> Replayed:
    if "error" in result:
        return Replayed(settings, total_bytes, result["error"])
    refused = result["refused"]
    return Replayed(
        settings,
        total_bytes,
        "",
        result["allocated_bytes"],
        result["reserved_bytes"],
        result["end_reserved_bytes"],
        result["device_calls"],
        result["device_frees"],
        None
        if refused is None
        else Refused(
            request_list.of_event[refused["request"]], refused["bytes"], refused["free_bytes"]
        ),
        result["seconds"],
        array("I", result["at"]),
        array("Q", result["levels"]),
        result["layout"],
        result["streams_reused"],
        result["refused_positions"],
        result["ignored_positions"],
    )


@dataclass(frozen=True)
class Exactness:
    """How a replay under the recording's own settings differs from the recording."""

    start_difference_bytes: int
    """Reserve at the beginning, replayed less recorded."""
    wrong_segments: int
    """Segments at the beginning whose blocks are not as they were."""
    allocations: int
    growths: int
    """How many times the card gave memory."""
    differing: int
    """Allocations after which the reserve was another than on the recording's card."""
    first_event: int | None
    """The first of them."""
    first_recorded_bytes: int = 0
    first_replayed_bytes: int = 0
    largest_bytes: int = 0
    """The largest difference of the reserve."""
    misplaced_segments: int = 0
    """Segments that could not be where the recording has them, because something else was there."""
    ignored_addresses: bool = False
    """Whether the order of the recorded addresses had no effect on the replay."""

    @property
    def is_exact(self) -> bool:
        """Whether the reserve was the same after every allocation."""
        return not self.differing and not self.start_difference_bytes


def exactness(request_list: Requests, device: Device, replayed: Replayed) -> Exactness:
    """Compare the reserve of a replay with the recorded one after each allocation.

    Args:
        request_list: what was replayed, ``positioned``, with ``releases``, without ``attempts``.
        device: the recording.
        replayed: the result under the recording's own settings.
    """
    begin = request_list.beginning
    assert replayed.at is not None
    assert replayed.levels is not None
    changes = dict(recorded_reserve(device, begin.reserved_bytes))
    ours = _level_before(replayed, request_list.first)
    start = ours - begin.reserved_bytes
    recorded = begin.reserved_bytes
    own = iter(zip(replayed.at, replayed.levels, strict=True))
    pending = next(own, None)
    allocations = differing = growths = largest = 0
    first: tuple[int, int, int] | None = None
    event_numbers = request_list.of_event
    event = 0
    for number in range(request_list.first, len(request_list.actions)):
        until = event_numbers[number]
        while event <= until:
            level = changes.get(event, recorded)
            growths += level > recorded
            recorded = level
            event += 1
        while pending is not None and pending[0] <= number:
            ours = pending[1]
            pending = next(own, None)
        if device.actions[until] != ALLOC:
            continue
        allocations += 1
        if ours != recorded:
            differing += 1
            largest = max(largest, ours - recorded, recorded - ours)
            first = first or (until, recorded, ours)
    event_number, recorded_then, replayed_then = first or (None, 0, 0)
    return Exactness(
        start_difference_bytes=start,
        wrong_segments=_wrong_segments(request_list, replayed),
        allocations=allocations,
        growths=growths,
        differing=differing,
        first_event=event_number,
        first_recorded_bytes=recorded_then,
        first_replayed_bytes=replayed_then,
        largest_bytes=largest,
        misplaced_segments=replayed.refused_positions,
        ignored_addresses=replayed.ignored_positions,
    )


def in_order_of_ages(
    request_list: Requests, device: Device, settings: str, exact: Exactness
) -> tuple[Replayed, Replayed] | None:
    """Return replays in which older segments come first, if that explains a recording better.

    Of free blocks of one size, torch's allocator takes that at the lowest address, torch 2.12 the
    oldest, and later versions that in the oldest segment. A file does not name the version that
    wrote it.

    Args:
        request_list: what was replayed.
        device: the recording.
        settings: its own settings.
        exact: how a replay in the order of the recorded addresses differs.

    Returns:
        Replays with ``releases`` and without ``attempts``, and the other way round.
    """
    if not exact.differing or not device.names_pools:  # those that do not are of older versions
        return None
    own, unlimited = run(request_list, [Run(settings, False, True), Run(settings)])
    if own.error or own.refused or unlimited.error:
        return None
    is_better = exactness(request_list, device, own).differing < exact.differing
    return (own, unlimited) if is_better else None


def _level_before(replayed: Replayed, request: int) -> int:
    assert replayed.at is not None
    assert replayed.levels is not None
    at = bisect_right(replayed.at, request - 1)
    return replayed.levels[at - 1] if at else 0


def _wrong_segments(request_list: Requests, replayed: Replayed) -> int:
    """Return how many segments at the beginning are not as the recording had them."""
    wanted = [
        (segment["bytes"], segment["is_small"], segment["blocks"])
        for segment in layout_of(request_list.beginning)
    ]
    rebuilt = [
        (size, is_small, [tuple(block) for block in _merged(blocks)])
        for _, size, _, is_small, _, blocks in sorted(replayed.layout)
    ]
    # The order matters: of two blocks of one size, the allocator takes that at the lower address.
    # Only the address ranges of expandable segments lie anywhere.
    expandable = any(segment.is_expandable for segment in request_list.beginning.segments)
    if wanted == rebuilt or (expandable and sorted(wanted) == sorted(rebuilt)):
        return 0
    missing = Counter(map(_hashable, wanted))
    missing.subtract(map(_hashable, rebuilt))
    wrong = sum(number for number in missing.values() if number > 0)
    return max(1, wrong)


def _hashable(segment: tuple[int, bool, list[Any]]) -> tuple[int, bool, tuple[Any, ...]]:
    return (*segment[:2], tuple(segment[2]))


def _merged(blocks: Sequence[Sequence[Any]]) -> Iterator[tuple[int, bool]]:
    """Yield blocks; free ones that touch are one, as in a recording."""
    free = 0
    for size, used in blocks:
        if used:
            if free:
                yield free, False
            free = 0
            yield size, True
        else:
            free += size
    if free:
        yield free, False
