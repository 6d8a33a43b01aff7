"""PyTorch's memory snapshot of a failed test, for its viewer (``--cka-memory-snapshots``)."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

from pytest_cka_memory.integrations.ranks import this_rank
from pytest_cka_memory.meters.base import Meter

_LONGEST_NAME = 120


@contextmanager
def history_recorded(folder: Path | None, meter: Meter) -> Iterator[None]:
    """Record the allocator's history in the block, if there is a folder for snapshots of it."""
    if folder is not None:
        meter.record_history()
    try:
        yield
    finally:
        if folder is not None:
            meter.stop_history()


def write_snapshot(folder: Path, nodeid: str, meter: Meter) -> str:
    """Write the allocator's history of a test to a file in `folder`; return a line about it.

    It does not raise if the file cannot be written: a full disk must not hide why the test failed.
    """
    path = _path(folder, nodeid)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not meter.dump_history(path):
            return f"no memory snapshot: {meter.device} records no allocation history"
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"no memory snapshot: cannot write {path}: {error.strerror or error}"
    return f"{path}: open it in PyTorch's memory viewer"


def _path(folder: Path, nodeid: str) -> Path:
    # With a checksum, because two tests may differ only in characters that file names cannot have.
    checksum = crc32(nodeid.encode(errors="backslashreplace"))
    name = f"{re.sub(r'[^-.A-Za-z0-9]+', '_', nodeid)[-_LONGEST_NAME:]}-{checksum:08x}"
    rank = this_rank()
    return folder / (f"{name}-rank{rank.number}.pickle" if rank else f"{name}.pickle")
