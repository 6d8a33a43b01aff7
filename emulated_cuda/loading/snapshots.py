"""What ``python -m emulated_cuda --snapshot FILE`` writes: torch's recording of each process."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path

from emulated_cuda import imports
from emulated_cuda.loading import children

SETTING = "snapshot"
"""The path of the file in the setting of :mod:`.children`."""


def write_at_exit() -> None:
    """Record allocations and write them when this process ends, if the environment says so."""
    path = children.setting_of(os.environ).get(SETTING)
    if path:
        imports.call_after("torch", _record)
        atexit.register(_write, _claimed(Path(path)), os.getpid())


def _claimed(path: Path) -> Path:
    """Return the file of this process: the plain name for the first, which is the program itself.

    A rank gets a name with its number, and any other process one with the number of the process.
    """
    rank = os.environ.get("RANK", "")
    if rank.isdigit():
        return path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
    try:
        path.touch(exist_ok=False)
    except OSError:
        return path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
    return path


def _record() -> None:
    from emulated_cuda import torch_private

    torch_private.record_history_when_initialized()


def _write(target: Path, process: int) -> None:
    torch = sys.modules.get("torch")
    if process != os.getpid():  # forked from the one that has the file
        return
    if torch is None or not torch.cuda.is_initialized():
        with suppress(OSError):
            if target.stat().st_size == 0:
                target.unlink()
        return
    from emulated_cuda import torch_private

    with suppress(Exception):  # a program that was measured must not end by an error of this
        torch_private.dump_history(str(target))
        shown = os.path.relpath(target) if target.is_relative_to(Path.cwd()) else str(target)
        print(
            f"emulated_cuda: {shown}: python -m pytest_cka_memory snapshot {shown}, or replay",
            file=sys.stderr,
        )
