"""Read from Linux which threads this process has, and where a loaded library has a variable."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_THREADS = Path("/proc/self/task")


def thread_may_exist(prefix: str) -> bool:
    """Whether a thread has a name that starts so; True if the system does not list threads."""
    if not _THREADS.is_dir():
        return True
    return any(_name_of_thread(thread).startswith(prefix) for thread in _THREADS.iterdir())


def wait_until_asleep(prefix: str, seconds: float = 1.0) -> bool:
    """Wait until the threads whose names start so have nothing more to do.

    A thread that waits for the interpreter's lock sleeps, too, so it must have slept all the while
    that this one left the lock to others.

    Args:
        prefix: of the names.
        seconds: the longest wait.

    Returns:
        Whether they sleep. True if there are none, or if the system does not list threads.
    """
    end = time.monotonic() + seconds
    before = None
    while True:
        now = _sleepers(prefix)
        if now is not None and now == before:
            return True
        if time.monotonic() > end:
            return False
        before = now
        time.sleep(0.002)


def _sleepers(prefix: str) -> dict[str, str] | None:
    """Return how often each of the threads was switched from; None if one does not sleep."""
    switches = {}
    for thread in _THREADS.iterdir() if _THREADS.is_dir() else ():
        if not _name_of_thread(thread).startswith(prefix):
            continue
        lines = dict(line.partition(":")[::2] for line in _read(thread / "status").splitlines())
        if lines and lines["State"].split()[0] != "S":
            return None
        switches[thread.name] = lines.get("voluntary_ctxt_switches", "")
    return switches


def _name_of_thread(thread: Path) -> str:
    return _read(thread / "comm")


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError:  # the thread has ended meanwhile
        return ""


_MAPS = Path("/proc/self/maps")
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2
_VARIABLE = 1
"""Type of a symbol that is neither a function nor thread-local."""


class _Section(NamedTuple):
    name: int
    """Where its name is in the table of names."""
    kind: int
    address: int
    """From where the library is loaded."""
    offset: int
    size: int
    link: int


def address_of_variable(library: str, name: str, size: int) -> int | None:
    """Return the address of a variable in this process; None if it cannot be found.

    Args:
        library: the file name of a loaded library, 64-bit ELF.
        name: the symbol, as the compiler writes it.
        size: bytes of the variable; one of another size is not the one that is meant.
    """
    try:
        base, path = _loaded(library)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            offset = _offset_of(data, name.encode(), size)
    except (OSError, ValueError, LookupError, struct.error):
        return None
    return None if offset is None else base + offset


def address_of_section(library: str, name: str) -> int | None:
    """Return the address of a part of a loaded library in this process; None if it cannot be found.

    Args:
        library: its file name; 64-bit ELF.
        name: of the section, such as ``.nvFatBinSegment``.
    """
    try:
        base, path = _loaded(library)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            sections = list(_sections(data))
            names = sections[_HEADER.unpack_from(data)[-1]]
            wanted = name.encode() + b"\0"
            for section in sections:
                start = names.offset + section.name
                if data[start : start + len(wanted)] == wanted:
                    return base + section.address
    except (OSError, ValueError, LookupError, struct.error):
        pass
    return None


def _loaded(library: str) -> tuple[int, str]:
    """Return the lowest address and the path of a loaded library."""
    for line in _MAPS.read_text("utf-8", "surrogateescape").splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and Path(path[0]).name == library and int(offset, 16) == 0:
            return int(addresses.partition("-")[0], 16), path[0]
    raise LookupError(library)


def _offset_of(data: mmap.mmap, name: bytes, size: int) -> int | None:
    sections = list(_sections(data))
    for section in sections:
        if section.kind != _SYMBOL_TABLE:
            continue
        names = sections[section.link]
        position = data.find(b"\0" + name + b"\0", names.offset, names.offset + names.size)
        if position < 0:
            continue
        table = data[section.offset : section.offset + section.size]
        for text, info, _, _, value, length in _SYMBOL.iter_unpack(table):
            if text == position + 1 - names.offset and info & 15 == _VARIABLE and length == size:
                return int(value)
    return None


def _sections(data: mmap.mmap) -> Iterator[_Section]:
    magic, *_, start, _, _, _, _, length, count, _ = _HEADER.unpack_from(data)
    if magic[:6] != b"\x7fELF\x02\x01" or length != _SECTION.size:
        raise ValueError("not a 64-bit ELF file")
    for number in range(count):
        row = _SECTION.unpack_from(data, start + number * length)
        yield _Section(row[0], row[1], row[3], row[4], row[5], row[6])
