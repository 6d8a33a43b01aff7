"""Reads what ``torch.cuda.memory._dump_snapshot`` wrote, on any card, without trusting the file.

With it, the settings of torch's allocator: as a snapshot has them, as ``PYTORCH_ALLOC_CONF`` does,
and how they round what is asked for.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from emulated_cuda.cards import CARDS
from emulated_cuda.packing import unpacked
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.reports import one_line
from pytest_cka_memory.snapshots import unpickling
from pytest_cka_memory.units import MB, format_with_unit

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE = range(5)
SEGMENT_MAP, SEGMENT_UNMAP, OUT_OF_MEMORY, SNAPSHOT = range(5, len(unpickling.ACTIONS))
INACTIVE, IN_USE, PENDING = range(3)
"""States of a block: free, allocated, and freed but still used by another stream."""
DEFAULT_POOL = (0, 0)

_MOST_FILE_BYTES = 4 * 2**30
_LEAST_MEMORY_BYTES = 2**30
_MEMORY_FACTOR = 30
"""A dict of an event takes about ten times the bytes that it has in the file."""
_LEAST_SECONDS = 20
_BYTES_PER_SECOND = 2 * 2**20
"""Fifty times slower than reading is: a file that takes longer was made to take long."""


class Frame(NamedTuple):
    """A line that ran."""

    file: str
    line: int
    function: str


class Site(NamedTuple):
    """Where something was allocated, as far as the stacks tell."""

    flags: int
    """Which functions of torch the stack has: flags of :mod:`.unpickling`."""
    frames: tuple[Frame, ...]
    """Up to four lines outside of libraries, the innermost first; empty if there is no stack."""


class Block(NamedTuple):
    """A part of a segment."""

    address: int
    bytes: int
    requested_bytes: int
    state: int
    """:data:`INACTIVE`, :data:`IN_USE` or :data:`PENDING`."""
    site: int


class Segment(NamedTuple):
    """Memory that the allocator had from the device when the snapshot was written."""

    device: int
    address: int
    bytes: int
    stream: int
    """A number as in the events of the device."""
    pool: int
    """The same; 0 for the allocator's own pool."""
    is_small: bool
    is_expandable: bool
    blocks: tuple[Block, ...]


class Event(NamedTuple):
    """What the allocator did."""

    action: int
    """:data:`ALLOC` and so on."""
    address: int
    """For :data:`OUT_OF_MEMORY`, the bytes that were free on the device."""
    bytes: int
    """Of blocks what was asked for, of segments what the device gave."""
    stream: int
    pool: int


@dataclass
class Device:
    """What was recorded of one device, its events in arrays."""

    index: int
    actions: bytes
    addresses: array[int]
    sizes: array[int]
    times: array[int]
    """Microseconds; 0 if the recording has no times."""
    streams: array[int]
    """Indices into :attr:`stream_names`."""
    pools: array[int]
    """Indices into :attr:`pool_names`; 0 for the allocator's own pool."""
    places: array[int]
    """Indices into :attr:`Snapshot.sites`; 0 without a stack."""
    stream_names: list[int]
    pool_names: list[tuple[int, int]]
    names_pools: bool
    """Whether the events say which pool they belong to; before torch 2.12 only segments did."""
    segments: list[Segment] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.actions)

    def events(self) -> Iterator[Event]:
        """Yield the events in their order."""
        return map(Event, self.actions, self.addresses, self.sizes, self.streams, self.pools)

    @property
    def is_of_refusal(self) -> bool:
        """Whether nothing was recorded but that an allocation was refused, with what was live."""
        return set(self.actions) == {OUT_OF_MEMORY}

    @property
    def is_used(self) -> bool:
        """Whether anything was recorded of it."""
        return bool(self.actions or self.segments)


@dataclass(frozen=True)
class Snapshot:
    """What one file has."""

    path: Path
    devices: list[Device]
    """Those of which something was recorded."""
    sites: list[Site]
    settings: Mapping[str, Any]
    """Of the allocator, as torch names them."""
    keys: Sequence[str]
    origin: Mapping[str, Any]
    """The card and the program, as ``python -m emulated_cuda --snapshot`` notes them."""
    host_events: int
    """Events of pinned memory of the host, which nothing here looks at."""


def read(path: str | Path) -> Snapshot:
    """Return what a snapshot has, without running anything that the file asks for.

    The file is read by another process, which may take 30 times its size in memory and a second
    for each 2 MB.

    Args:
        path: a file that ``torch.cuda.memory._dump_snapshot`` of torch 2.1 or later wrote.

    Raises:
        ReportError: if it cannot be read, is not a snapshot, or exceeds a limit. The message is
            one line that says which.

    Example:
        >>> from pytest_cka_memory.snapshots.reading import read
        >>> read("no.pickle")
        Traceback (most recent call last):
        ...
        pytest_cka_memory.errors.ReportError: cannot read no.pickle: No such file or directory
    """
    path = Path(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None
    if not path.is_file():
        raise ReportError(f"cannot read {path}: not a regular file")
    if size > _MOST_FILE_BYTES:
        raise ReportError(
            f"cannot read {path}: the file has {format_with_unit(size)}, and the limit is "
            f"{format_with_unit(_MOST_FILE_BYTES)}; record fewer events with max_entries="
        )
    return _snapshot(path, _answer(path, size))


def _answer(path: Path, size: int) -> dict[str, Any]:
    memory = _LEAST_MEMORY_BYTES + _MEMORY_FACTOR * size
    seconds = _LEAST_SECONDS + size // _BYTES_PER_SECOND
    refusal = f"cannot read {path} as a snapshot: "
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                unpickling.__name__,
                str(path.absolute()),
                str(memory),
                str(seconds),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=10 * seconds,  # the limit above is on the time that it computes
            check=False,
        )
        kind, content = unpacked(done.stdout)
    except (ValueError, EOFError, TypeError, subprocess.TimeoutExpired):
        raise ReportError(
            f"{refusal}reading it took more than {seconds} s or {format_with_unit(memory)}, more "
            "than any valid snapshot of this size needs; record it again"
        ) from None
    if kind == "memory":
        raise ReportError(
            f"{refusal}reading it took more than {format_with_unit(memory)}, more than any valid "
            "snapshot of this size needs; record it again"
        )
    if kind == "refused":
        raise ReportError(f"{refusal}{content}")
    answer: dict[str, Any] = content
    return answer


def _snapshot(path: Path, data: Mapping[str, Any]) -> Snapshot:
    frames = [Frame(*frame) for frame in data["frames"]]
    sites = [
        Site(numbers[0], tuple(frames[number] for number in numbers[1:]))
        for numbers in data["sites"]
    ]
    devices = [_device(index, arrays) for index, arrays in enumerate(data["devices"])]
    for row in data["segments"]:
        _add_segment(devices, row)
    return Snapshot(
        path,
        [device for device in devices if device.is_used],
        sites,
        data["settings"],
        data["keys"],
        data["origin"],
        data["host_events"],
    )


def _device(index: int, arrays: Mapping[str, Any]) -> Device:
    return Device(
        index,
        arrays["actions"],
        addresses=array("Q", arrays["addresses"]),
        sizes=array("Q", arrays["sizes"]),
        times=array("Q", arrays["times"]),
        streams=array("I", arrays["streams"]),
        pools=array("I", arrays["pools"]),
        places=array("I", arrays["places"]),
        stream_names=arrays["stream_names"],
        pool_names=[tuple(pool) for pool in arrays["pool_names"]],
        names_pools=arrays["names_pools"],
    )


def _add_segment(devices: list[Device], row: Sequence[Any]) -> None:
    number, address, size, stream, pool, is_small, is_expandable, blocks = row
    while len(devices) <= number:
        empty = (array("Q"), array("Q"), array("Q"), array("I"), array("I"), array("I"))
        devices.append(Device(len(devices), b"", *empty, [], [DEFAULT_POOL], False))
    device = devices[number]
    segment = Segment(
        number,
        address,
        size,
        _number_of(stream, device.stream_names),
        _number_of(tuple(pool or DEFAULT_POOL), device.pool_names),
        is_small,
        is_expandable,
        tuple(Block(*block) for block in blocks),
    )
    device.segments.append(segment)


def _number_of(name: Any, names: list[Any]) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def card_and_script(origin: Mapping[str, Any]) -> str:
    """Return the arguments of ``repair`` after ``--card``, with names for what is not known.

    Args:
        origin: that of a snapshot. Whoever wrote the file may have put anything into it.

    Example:
        >>> card_and_script({"card": "t4", "program": "train.py --batch 8"})
        't4 train.py --batch 8'
    """
    card, program, size = (str(origin.get(key, "")) for key in ("card", "program", "usable_mb"))
    card = card if card in CARDS else "CARD"
    card += f" --to={size}" if size.isdecimal() else ""
    try:
        words = shlex.split(program)
    except ValueError:  # an open quote
        words = []
    if not words or not words[0].endswith(".py"):
        return f"{card} SCRIPT.py, or a test instead of the script"
    return f"{card} {one_line(shlex.join(words))}"


ALTERNATIVES = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "max_split_size_mb:128,expandable_segments:True",
)
"""What is tried if nothing is named."""


def recorded_settings(settings: Mapping[str, Any]) -> str:
    """Return the text of ``PYTORCH_ALLOC_CONF`` that has the settings of a snapshot.

    Settings of pinned memory and of the time at which locks are held change no figure here.

    Args:
        settings: ``allocator_settings`` of a snapshot.

    Example:
        >>> recorded_settings({"expandable_segments": True, "max_split_size": -1})
        'expandable_segments:True'
    """
    parts = []
    if settings.get("expandable_segments") is True:
        parts.append("expandable_segments:True")
    split = settings.get("max_split_size", -1)
    if _is_number(split) and 0 < split < 2**40:
        parts.append(f"max_split_size_mb:{int(split) // MB}")
    rounding = settings.get("max_non_split_rounding_size", settings.get("max_round_threshold", -1))
    if _is_number(rounding) and 0 < rounding < 2**40:
        parts.append(f"max_non_split_rounding_mb:{int(rounding) // MB}")
    threshold = settings.get("garbage_collection_threshold", 0)
    if _is_number(threshold) and 0 < threshold < 1:
        parts.append(f"garbage_collection_threshold:{threshold:g}")
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, dict) and any(divisions.values()):
        parts.append(f"roundup_power2_divisions:{_divisions(divisions)}")
    return ",".join(parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _divisions(table: Mapping[str, Any]) -> str:
    """Return the table of roundings: one number, or a list of sizes in MB."""
    known = {int(size): int(number) for size, number in table.items() if size.isdigit()}
    values = set(known.values())
    if len(values) == 1:
        return str(values.pop())
    # 0 stands for no rounding, which is written as 1.
    pairs = [f"{size}:{max(1, known[size])}" for size in sorted(known)]
    return f"[{','.join(pairs)}]"


_LEAST_BLOCK_BYTES = 512


def rounding(settings: Mapping[str, Any]) -> Callable[[int], int]:
    """Return the function that turns a request into the bytes of its block.

    Args:
        settings: ``allocator_settings`` of a snapshot.

    Example:
        >>> rounding({})(1000)
        1024
    """
    divisions = settings.get("roundup_power2_divisions")
    table = divisions if isinstance(divisions, dict) else {}
    by_exponent: dict[int, int] = {
        int(size).bit_length() - 1: int(number)
        for size, number in table.items()
        if size.isdigit() and number > 1
    }
    if not by_exponent:
        return _rounded
    most = max(by_exponent)

    def rounded(size: int) -> int:
        exponent = max(0, (size // MB).bit_length() - 1)
        number = by_exponent.get(min(exponent, most), 0)
        if number < 2 or size <= _LEAST_BLOCK_BYTES * number:
            return _rounded(size)
        step = max(1, (1 << (size.bit_length() - 1)) // number)
        return -(-size // step) * step

    return rounded


def _rounded(size: int) -> int:
    return max(_LEAST_BLOCK_BYTES, -(-size // _LEAST_BLOCK_BYTES) * _LEAST_BLOCK_BYTES)
