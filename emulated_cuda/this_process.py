"""What this process does and has: calls around imports, threads, libraries, and how it ends.

Which threads it has, and where a loaded library has a variable, is read from Linux.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

_before: dict[str, list[Callable[[], None]]] = defaultdict(list)
_after: dict[str, list[Callable[[], None]]] = defaultdict(list)


def call_before(module: str, function: Callable[[], None]) -> None:
    """Call `function` as soon as the program begins to import a module; not if it already has."""
    if module not in sys.modules:
        _before[module].append(function)
        _watch(module)


def call_after(module: str, function: Callable[[], None]) -> None:
    """Call `function` now, or as soon as the program has imported a module."""
    if module in sys.modules:
        function()
    else:
        _after[module].append(function)
        _watch(module)


def _watch(module: str) -> None:
    finders = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    if not any(finder.module == module for finder in finders):
        sys.meta_path.insert(0, _Finder(module))


class _Finder(MetaPathFinder):
    """Finds a module as the other finders do, and calls the functions around its import."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.module:
            return None
        spec = _spec_by_others(self, name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        create, execute = loader.create_module, loader.exec_module

        def create_module(spec: ModuleSpec) -> ModuleType | None:
            _call_all(_before[name])  # here the module is not in sys.modules yet
            module: ModuleType | None = create(spec)
            return module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _call_all(_after[name])

        loader.create_module, loader.exec_module = create_module, exec_module
        return spec


def _spec_by_others(
    this: MetaPathFinder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if finder is not this and find is not None:
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                return spec
    return None


def _call_all(functions: list[Callable[[], None]]) -> None:
    while functions:
        functions.pop(0)()


_THREADS = Path("/proc/self/task")


_without: dict[str, tuple[list[str], bool]] = {}
"""The start of a name -> the numbers of the threads when none had such a name, and whether that was
found twice: a thread gets its name when it begins to run."""


def thread_may_exist(prefix: str) -> bool:
    """Whether a thread has a name that starts so; True if the system does not list threads."""
    if not _THREADS.is_dir():
        return True
    numbers = os.listdir(_THREADS)
    before, was_found_twice = _without.get(prefix, ([], False))
    if numbers == before and was_found_twice:
        return False
    is_any = any(_name_of_thread(_THREADS / number).startswith(prefix) for number in numbers)
    if not is_any:
        _without[prefix] = numbers, numbers == before
    return is_any


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


_SIGNAL_AT_END_OF_PARENT = 1  # PR_SET_PDEATHSIG


def ending_with_this_process() -> Callable[[], None]:
    """Return what a child calls before it starts, so that it ends if this process is killed."""
    import ctypes  # not for each process that imports this module

    this_process = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_SIGNAL_AT_END_OF_PARENT, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != this_process:  # the parent ended before prctl, so no signal will come
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as an error does: it ends its children, and cleans up.

    What ignores a signal goes on to do so, such as a command that ``nohup`` starts.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others may set no handler
    handled = [each for each in _SIGNALS if is_main and signal.getsignal(each) == signal.SIG_DFL]

    def end(number: int, _: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)  # a second one would interrupt the cleaning up
        raise SystemExit(128 + number)  # as a shell says it

    for each in handled:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)


def end_like(status: int) -> int:
    """Return an exit status; end this process by a signal if one has ended the program."""
    if status < 0:
        sys.stderr.flush()
        with suppress(OSError):  # SIGKILL has no other action
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status
