"""Prepares a server whose imports are done for the processes that it forks: its last import.

What was imported is hidden from the garbage collector. Each collection of a process that is forked
would walk over the modules of torch, and copy their pages. They reference no tensor but constants
of `emulated_cuda`.
"""

import atexit
import ctypes
import gc
import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_HUGE_BYTES = 2 * 2**20
_COLLAPSE = 25  # MADV_COLLAPSE, which Python's mmap does not name


def use_huge_pages() -> None:
    """Move the heap into huge pages, as Linux can since 6.1; elsewhere do nothing.

    A fork copies an entry for each page, and its end removes them. A process that does nothing took
    71 ms with pages of 4 KB, and 31 ms with huge ones.
    """
    # ValueError and AttributeError: this operating system has other functions.
    with suppress(OSError, ValueError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        for begin, end in _heap():
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE)


def _heap() -> Iterator[tuple[int, int]]:
    """Yield the private memory of this process that no file is mapped to, in whole huge pages."""
    if mmap.PAGESIZE != 4096:  # huge pages have another size then
        return
    for line in _MAPS.read_text("ascii").splitlines():
        mapping = re.match(r"(\w+)-(\w+) rw-p 00000000 00:00 0 *(\[heap\])?$", line)
        if mapping is None:
            continue
        begin = -(-int(mapping[1], 16) // _HUGE_BYTES) * _HUGE_BYTES
        end = int(mapping[2], 16) // _HUGE_BYTES * _HUGE_BYTES
        if begin < end:
            yield begin, end


gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # libraries report what is still there at the end of the process
use_huge_pages()
