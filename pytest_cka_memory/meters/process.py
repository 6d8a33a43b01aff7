"""Read the memory of this process and its children; psutil knows which these are."""

import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from pytest_cka_memory.errors import MissingPackageError

INSTALL = (
    "memory of the process needs psutil, which is not installed; run pip install "
    "'pytest-cka-memory[process]'"
)
_OWN = "this process"
_WORKER = "DataLoader worker"
_NAME_OF_WORKERS = "pt_data_worker"
"""What torch calls the processes that load data."""
_ROLLUP = re.compile(rb"^(Pss_Anon|Pss_Shmem|Anonymous): +(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class ProcessReading:
    """The memory of one process at one moment."""

    pid: int
    name: str
    bytes: int
    anonymous_bytes: int | None = None
    """Of anonymous memory, shared or not; it does not rise if the process copies a shared page.
    None on a system that does not count it."""


def is_available() -> bool:
    """Whether psutil is installed; does not import it."""
    return find_spec("psutil") is not None


class ProcessTree:
    """The process that runs this code and its children, also their children.

    Raises:
        MissingPackageError: if psutil is not installed.
    """

    def __init__(self) -> None:
        if not is_available():
            raise MissingPackageError(INSTALL)
        import psutil

        self._own = psutil.Process()
        self._gone = psutil.Error
        self._names: dict[int, str] = {}
        self._workers = 0

    def read(self) -> list[ProcessReading]:
        """Return the memory of each process that runs; this one is the first.

        On Linux it is the proportional set size of anonymous and shared memory: a page that several
        processes use counts once in their sum, and pages of files, such as those of libraries, do
        not count, because the system drops them when it needs memory. On other systems it is what
        is unique to each process.
        """
        readings = [ProcessReading(self._own.pid, _OWN, *_memory_of(self._own))]
        for child in self._own.children(recursive=True):
            try:
                size, anonymous_bytes = _memory_of(child)
                if size:  # a process that has ended and was not waited for has none
                    name = self._name_of(child)
                    readings.append(ProcessReading(child.pid, name, size, anonymous_bytes))
            except self._gone:  # it has ended meanwhile, or belongs to another user
                continue
        return readings

    def _name_of(self, child: Any) -> str:
        known = self._names.get(child.pid, "")
        if known.startswith(_WORKER):
            return known
        name = str(child.name())
        if name == _NAME_OF_WORKERS:
            name = f"{_WORKER} {self._workers}"
            self._workers += 1
        self._names[child.pid] = name
        return name


def _memory_of(process: Any) -> tuple[int, int | None]:
    """Return the bytes of one process, and of its anonymous memory if the system counts that.

    Raises:
        psutil.Error: if it has ended, or this user may not read it.
    """
    if sys.platform == "linux":
        sizes = _rolled_up(process.pid)
        if sizes is not None:
            return sizes
    info: Any = process.memory_full_info()
    return int(getattr(info, "uss", info.rss)), None


def _rolled_up(pid: int) -> tuple[int, int] | None:
    """Return what ``smaps_rollup`` says of both; None on a system that lacks its lines."""
    own = "self" if pid == os.getpid() else str(pid)
    try:
        with open(f"/proc/{own}/smaps_rollup", "rb") as file:
            sizes = {name: 1024 * int(size) for name, size in _ROLLUP.findall(file.read())}
    except OSError:
        return None
    if len(sizes) < 3:
        return None
    return sizes[b"Pss_Anon"] + sizes[b"Pss_Shmem"], sizes[b"Anonymous"]
