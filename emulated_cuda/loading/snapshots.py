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
RUNNER = "runner"
"""The number of the process that starts the program: the program itself gets the plain name."""


def write_at_exit() -> None:
    """Record allocations and write them when this process ends, if the environment says so."""
    path = children.setting_of(os.environ).get(SETTING)
    if path:
        imports.call_after("torch", _record)
        atexit.register(_write, Path(path))


def _record() -> None:
    from emulated_cuda import torch_private

    torch_private.record_history_when_initialized()


def _write(path: Path) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    from emulated_cuda import torch_private

    target = _own(path)
    with suppress(Exception):  # a program that was measured must not end by an error of this
        torch_private.dump_history(str(target))
        shown = os.path.relpath(target) if target.is_relative_to(Path.cwd()) else str(target)
        print(
            f"emulated_cuda: {shown}: python -m pytest_cka_memory snapshot {shown}, or replay",
            file=sys.stderr,
        )


def _own(path: Path) -> Path:
    """Return the path for this process: with its rank, or its number if the program started it."""
    rank = os.environ.get("RANK")
    if rank is not None and rank.isdigit():
        return path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
    if children.setting_of(os.environ).get(RUNNER) == os.getppid():
        return path
    return path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
