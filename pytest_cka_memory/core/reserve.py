"""Why an allocator holds more than is in use: its segments, by pool and stream.

Works on the segments that ``torch.cuda.memory_snapshot()`` returns or a snapshot file has, without
torch. A segment is what the allocator has taken from the driver. It can give back only a whole
one, or, of an expandable segment, whole pages. So one small block in use keeps all that is free
beside it: those are the parts that nobody uses and nobody else can have.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nlargest
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from emulated_cuda.torch_versions import allocator_variable
from pytest_cka_memory.units import MB, counted, format_with_unit

PoolId = tuple[int, ...]
"""Of one of the allocator's pools, as ``torch.cuda.CUDAGraph.pool`` returns it."""
NO_POOL: PoolId = (0, 0)
"""What every allocation is taken from that belongs to no graph and no ``MemPool``."""
MOST_DESCRIBED = 50_000
"""If more blocks lie beside free memory, only those beside the most are described."""
SMALL_PAGE, LARGE_PAGE = 2 * MB, 20 * MB
"""Pages of expandable segments with blocks of at most 1 MB, and of the others."""
_LARGE_SEGMENT = re.compile(r"large_segment_size_mb:(\d+)")
"""Sets the size of the latter. A snapshot has it only in the text of the settings."""
_IN_USE = "active_allocated"
_FREE = "inactive"


class PartlyUsed(NamedTuple):
    """A segment, or a page of an expandable one, that has blocks in use and free parts."""

    blocks: tuple[int, ...]
    """The addresses of the blocks that are in use, or that a stream may still use."""
    free_bytes: int
    """What cannot be released as long as these blocks are in use."""


@dataclass(frozen=True, kw_only=True)
class ReservePart:
    """What one pool has reserved for one stream, in bytes: the sum of the five that follow."""

    pool: str
    """What owns the pool, in words; empty for what belongs to no graph and no ``MemPool``."""
    stream: int
    """The stream whose requests it serves: 0 is the default stream, others are numbered."""
    reserved_bytes: int
    in_use_bytes: int
    """Requested for what is in use."""
    rounding_bytes: int
    """By how much the blocks in use are larger than requested."""
    waiting_bytes: int
    """Freed, but a stream that has used them may not be done yet."""
    free_whole_bytes: int
    """In whole segments, and pages of expandable ones, that are free: what
    ``torch.cuda.empty_cache()`` releases unless the pool is that of a graph."""
    free_part_bytes: int
    """Free beside blocks in use, so that it cannot be released."""
    largest_free_bytes: int
    """The largest request that needs no more memory from the driver, apart from rounding."""
    oversized_bytes: int
    """How much of the free memory is in blocks of ``max_split_size_mb`` and more, which smaller
    requests cannot use."""
    segments: int
    """Number of segments."""
    is_expandable: bool = False
    """Whether some of these are expandable."""

    @property
    def free_bytes(self) -> int:
        """What is reserved and could be allocated."""
        return self.free_whole_bytes + self.free_part_bytes


@dataclass(frozen=True)
class DrawnBlock:
    """A block in use, in a picture of its segment."""

    offset: int
    bytes: int
    address: int
    line: str = ""
    """The line that allocated it, or what else is known of it."""


@dataclass(frozen=True)
class DrawnSegment:
    """A segment that cannot be released as a whole, with what is in use."""

    bytes: int
    blocks: tuple[DrawnBlock, ...]
    """In the order of their addresses; the largest, if there are more than a picture can show."""


@dataclass(frozen=True)
class ReserveState:
    """The reserve of a device at one moment."""

    parts: tuple[ReservePart, ...]
    """One for each pool and stream, the largest first."""
    partly_used: tuple[PartlyUsed, ...]
    """The segments and pages that cannot be released, in the order of the segments."""
    drawn: tuple[DrawnSegment, ...] = ()
    """The segments with the most of what cannot be released, in the order of their addresses."""

    def keeps(self, blocks: Iterable[int]) -> int:
        """Return how many free bytes cannot be released while any of `blocks` is in use."""
        places = {place for block in blocks for place in self._places.get(block, ())}
        return sum(self.partly_used[place].free_bytes for place in places)

    @cached_property
    def _places(self) -> Mapping[int, Sequence[int]]:
        """Address of a block -> the places in `partly_used` that it keeps: two at most."""
        places: dict[int, list[int]] = {}
        for place, used in enumerate(self.partly_used):
            for block in used.blocks:
                places.setdefault(block, []).append(place)
        return places


@dataclass
class _Sums:
    pool: str
    stream: int
    reserved_bytes: int = 0
    in_use_bytes: int = 0
    rounding_bytes: int = 0
    waiting_bytes: int = 0
    free_whole_bytes: int = 0
    free_part_bytes: int = 0
    largest_free_bytes: int = 0
    oversized_bytes: int = 0
    segments: int = 0
    is_expandable: bool = False


def explain_reserve(
    segments: Iterable[Mapping[str, Any]],
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    pool_name: Callable[[PoolId], str] = lambda pool: f"private pool {pool}",
) -> ReserveState:
    """Return what the segments of one device consist of.

    Takes about a microsecond for each block.

    Args:
        segments: as ``torch.cuda.memory_snapshot()`` returns them, of torch 2.1 or later.
        settings: those of the allocator, as a snapshot has them in ``allocator_settings``.
        pool_name: returns what owns a pool of a graph or a ``MemPool``, in words. Pools of the same
            owner are put together.

    Example:
        ``explain_reserve(torch.cuda.memory_snapshot()).parts[0].free_part_bytes``
    """
    max_split_bytes = int(settings.get("max_split_size", -1))
    setting = _LARGE_SEGMENT.search(str(settings.get("PYTORCH_CUDA_ALLOC_CONF", "")))
    large_page_bytes = int(setting[1]) * MB if setting else LARGE_PAGE
    sums: dict[tuple[str, int], _Sums] = {}
    streams = {0: 0}
    partly_used: list[PartlyUsed] = []
    kept: list[tuple[int, Mapping[str, Any]]] = []
    for segment in segments:
        pool_id = tuple(segment.get("segment_pool_id", NO_POOL))
        pool = "" if pool_id == NO_POOL else pool_name(pool_id)
        stream = streams.setdefault(int(segment.get("stream", 0)), len(streams))
        if (pool, stream) not in sums:
            sums[pool, stream] = _Sums(pool, stream)
        count = len(partly_used)
        partly_used += _add(
            segment, sums[pool, stream], max_split_bytes, _page_of(segment, large_page_bytes)
        )
        if len(partly_used) > count:
            free_bytes = sum(it.free_bytes for it in partly_used[count:])
            kept.append((free_bytes, segment))
            kept = _most_kept(kept) if len(kept) > 2 * _MOST_DRAWN else kept
    parts = sorted(sums.values(), key=lambda it: -it.reserved_bytes)
    drawn = sorted((it for _, it in _most_kept(kept)), key=lambda it: it.get("address", 0))
    return ReserveState(
        tuple(ReservePart(**vars(it)) for it in parts),
        tuple(partly_used),
        tuple(map(_drawn, drawn)),
    )


_MOST_DRAWN, _MOST_BLOCKS_DRAWN = 8, 120


def _most_kept(
    kept: Iterable[tuple[int, Mapping[str, Any]]],
) -> list[tuple[int, Mapping[str, Any]]]:
    """Return those with the most of what cannot be released, of pairs of that and a segment."""
    return nlargest(_MOST_DRAWN, kept, key=itemgetter(0))


def _drawn(segment: Mapping[str, Any]) -> DrawnSegment:
    blocks, offset = [], 0
    for block in segment["blocks"]:
        size = int(block["size"])
        if block["state"] != _FREE:
            address = int(block.get("address", int(segment.get("address", 0)) + offset))
            blocks.append(DrawnBlock(offset, size, address))
        offset += size
    largest = nlargest(_MOST_BLOCKS_DRAWN, blocks, key=lambda it: it.bytes)
    return DrawnSegment(offset, tuple(sorted(largest, key=lambda it: it.offset)))


def _page_of(segment: Mapping[str, Any], large_page_bytes: int) -> int:
    """Return how many bytes of a segment are released at once."""
    if not segment.get("is_expandable"):
        return int(segment["total_size"]) or 1
    return SMALL_PAGE if segment.get("segment_type") == "small" else large_page_bytes


def _add(
    segment: Mapping[str, Any], sums: _Sums, max_split_bytes: int, page_bytes: int
) -> Iterator[PartlyUsed]:
    """Add a segment to `sums`; yield those of its pages that are partly in use."""
    total_bytes = int(segment["total_size"])
    sums.reserved_bytes += total_bytes
    sums.segments += 1
    sums.is_expandable |= bool(segment.get("is_expandable"))
    used: dict[int, _Page] = {}
    free_bytes = offset = 0
    for block in segment["blocks"]:
        size, state = int(block["size"]), block["state"]
        if state == _FREE:
            free_bytes += size
            sums.largest_free_bytes = max(sums.largest_free_bytes, size)
            if 0 < max_split_bytes <= size:
                sums.oversized_bytes += size
        else:
            # Before torch 2.1, a block has no address of its own.
            address = int(block.get("address", int(segment.get("address", 0)) + offset))
            _note_used(used, address, offset, size, page_bytes)
            if state == _IN_USE:
                requested = min(size, int(block.get("requested_size", size)))
                sums.in_use_bytes += requested
                sums.rounding_bytes += size - requested
            else:
                sums.waiting_bytes += size
        offset += size
    kept_bytes = 0
    for number, page in used.items():
        page_end = min(total_bytes, (number + 1) * page_bytes)
        rest = page_end - number * page_bytes - page.used_bytes
        if rest > 0:
            kept_bytes += rest
            yield PartlyUsed(tuple(page.blocks), rest)
    sums.free_part_bytes += kept_bytes
    sums.free_whole_bytes += free_bytes - kept_bytes


@dataclass(slots=True)
class _Page:
    used_bytes: int = 0
    blocks: list[int] = field(default_factory=list)


def _note_used(
    used: dict[int, _Page], address: int, offset: int, size: int, page_bytes: int
) -> None:
    """Note a block at the pages where it begins and ends: those between are used as a whole."""
    first, last = offset // page_bytes, max(offset, offset + size - 1) // page_bytes
    for number in {first, last}:
        begin, end = number * page_bytes, (number + 1) * page_bytes
        page = used.setdefault(number, _Page())
        page.used_bytes += min(end, offset + size) - max(begin, offset)
        page.blocks.append(address)


# What the parts mean, as text.

_LEAST_SHARE = 0.02
"""What is less than this share of the reserve is not mentioned."""


def total_of(parts: Sequence[ReservePart]) -> ReservePart:
    """Return the sum of all pools and streams; the largest free block is that of no private pool.

    Raises:
        ValueError: if there are no parts.
    """
    if not parts:
        raise ValueError("there is no reserve to explain")
    names = [name for name in vars(parts[0]) if name.endswith("_bytes")]
    total = replace(
        parts[0],
        pool="",
        stream=0,
        segments=sum(part.segments for part in parts),
        is_expandable=any(part.is_expandable for part in parts),
        **{name: sum(getattr(part, name) for part in parts) for name in names},
    )
    shared = [part.largest_free_bytes for part in parts if not part.pool]
    return replace(total, largest_free_bytes=max(shared, default=0))


def reserve_lines(parts: Sequence[ReservePart]) -> Iterator[str]:
    """Yield what the reserve consists of: a line for all, and one for each pool and stream.

    Only the largest four of these are listed, and none if all is on the default stream.
    """
    if not parts:
        yield "nothing is reserved"
        return
    total = total_of(parts)
    yield f"of {format_with_unit(total.reserved_bytes)} reserved, {_words(total)}"
    if total.largest_free_bytes:
        yield f"the largest free block has {format_with_unit(total.largest_free_bytes)}"
    if len(parts) == 1 and not parts[0].pool:
        return
    for part in parts[:_MOST_PARTS]:
        yield f"{place_of(part)}: {format_with_unit(part.reserved_bytes)}, {_words(part)}"
    rest = parts[_MOST_PARTS:]
    if rest:
        rest_bytes = sum(part.reserved_bytes for part in rest)
        yield f"and {counted(len(rest), 'smaller pool')}: {format_with_unit(rest_bytes)}"


_MOST_PARTS = 4


def place_of(part: ReservePart) -> str:
    """Return the pool and stream of a part in words."""
    stream = "the default stream" if part.stream == 0 else f"stream {part.stream}"
    return f"{part.pool}, {stream}" if part.pool else stream


def _words(part: ReservePart) -> str:
    in_use = f"{format_with_unit(part.in_use_bytes)} in use"
    least = _LEAST_SHARE * part.reserved_bytes
    sizes = (
        (part.free_part_bytes, "free beside blocks in use"),
        (part.free_whole_bytes, "free in whole segments"),
        (part.waiting_bytes, "freed but perhaps still used by a stream"),
        (part.rounding_bytes, "rounding"),
    )
    others = [f"{format_with_unit(size)} {what}" for size, what in sizes if size > least]
    return ", ".join([in_use, *others])


POOLS_ADVICE = (
    "delete every graph of the private pool, or the MemPool (until then the pool keeps its "
    "reserved memory); let graphs that never run at the same time share one pool; call "
    "torch.compiler.reset() if torch.compile has captured the graphs"
)
_OVERSIZED = (
    "leave max_split_size_mb out of PYTORCH_ALLOC_CONF, or make it larger; free blocks of "
    "at least that size serve only requests of at least that size"
)
_OF_STREAMS = (
    "allocate on one stream, or call torch.cuda.empty_cache() after the work of the other stream; "
    "the allocator does not use free memory of one stream for another"
)
_WAITING = (
    "synchronize before these blocks are needed again, or allocate them on the stream that "
    "uses them; blocks that were used on another stream (record_stream) wait for that "
    "stream"
)
_IN_PARTS = (
    "allocate the tensors that stay before those that are freed, so that the two kinds do not "
    "alternate in memory; to see which settings of the allocator help, run python -m "
    "pytest_cka_memory replay on a snapshot"
)
_WHOLE = (
    "set PYTORCH_ALLOC_CONF=expandable_segments:True, so that the allocator can join free "
    "memory, or call torch.cuda.empty_cache() to release it; the free blocks do not fit "
    "requests of other sizes"
)
_NOT_AT_ONCE = (
    "call torch.cuda.empty_cache() to release the free memory; it was in use at another moment"
)
_SEGMENTS = (
    "raise the limit to leave room for one segment of each kind; the allocator takes segments of "
    "2 MB for blocks up to 1 MB, of 20 MB for blocks up to 10 MB, and of a multiple of 2 MB for "
    "larger blocks"
)


def reserve_advice(parts: Sequence[ReservePart], *, has_limit: bool = True) -> str:
    """Return what to do about the largest cause of a reserve that is larger than what is in use.

    Empty if it is not larger.

    Args:
        parts: the reserve.
        has_limit: whether a limit on it broke. Without one, there is no advice on a reserve that is
            only larger by a segment.
    """
    if not parts:
        return ""
    total = total_of(parts)
    unused_bytes = total.reserved_bytes - total.in_use_bytes - total.rounding_bytes
    if unused_bytes <= 0:
        return ""
    of_pools = sum(part.free_bytes for part in parts if part.pool)
    streams = [part for part in parts if not part.pool]
    most_in_use = max((part.in_use_bytes for part in streams), default=0)
    of_streams = sum(part.free_bytes for part in streams if part.in_use_bytes < most_in_use)
    free_bytes = total.free_bytes - of_pools - of_streams
    half = unused_bytes / 2
    if unused_bytes <= SMALL_PAGE + LARGE_PAGE and not of_pools:
        return _SEGMENTS if has_limit else ""
    if total.oversized_bytes > half:
        return _named(_OVERSIZED)
    if total.waiting_bytes > half:
        return _WAITING
    if of_pools > half:
        return POOLS_ADVICE
    if of_streams > half:
        return _OF_STREAMS
    if total.free_part_bytes > free_bytes / 2:
        return _IN_PARTS
    return _NOT_AT_ONCE if total.is_expandable else _named(_WHOLE)


def _named(advice: str) -> str:
    return advice.replace("PYTORCH_ALLOC_CONF", allocator_variable())
