"""Run a program of somebody else in this process, and keep what it records.

    python recorded_one.py INTO DUMP FOLDER SCRIPT [ARGUMENT ...]

The process has an emulated card without values. The program runs as it is, with these differences:
what :func:`torch.cuda.memory._dump_snapshot` would write goes to ``INTO`` at its call number
``DUMP``, after which the program ends; and weights on the CPU are not given values, so that a
model of 14 GB takes no memory of this computer before it is moved to the card. With
``FROM_START=1`` in the environment the recording begins with the program instead.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

_INITIAL_VALUES = ("trunc_normal_", "normal_", "uniform_", "xavier_uniform_", "kaiming_uniform_")


class _Recorded(BaseException):
    """The recording is written: the rest of the program is not needed."""


def _keep(into: Path, wanted: int) -> None:
    """Write the recording number ``wanted`` of the program to ``into``, and no other one."""
    dump = torch.cuda.memory._dump_snapshot
    seen = 0

    def kept(*_args: object, **_named: object) -> None:
        nonlocal seen
        seen += 1
        if seen == wanted:
            dump(str(into))
            raise _Recorded

    torch.cuda.memory._dump_snapshot = kept


def _leave_without_values() -> None:
    """Let functions of :mod:`torch.nn.init` return tensors of the CPU as they are."""

    def replacing(given: Any) -> Any:
        def initial(tensor: torch.Tensor, *args: object, **named: object) -> torch.Tensor:
            return given(tensor, *args, **named) if tensor.is_cuda else tensor

        return initial

    for name in _INITIAL_VALUES:
        setattr(torch.nn.init, name, replacing(getattr(torch.nn.init, name)))


def _record_from_start() -> None:
    """Record from now on, whatever the program does."""
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=10**7, context=None)
    torch.cuda.memory._record_memory_history = lambda *_args, **_named: None


def main() -> None:
    """Run the program."""
    into, wanted, folder, script, *arguments = sys.argv[1:]
    _keep(Path(into).absolute(), int(wanted))
    _leave_without_values()
    if os.environ.get("FROM_START") == "1":
        _record_from_start()
    root = Path(folder).absolute()
    for package in (root, root / "cs336-basics", (root / script).parent):
        sys.path.insert(0, str(package))
    os.chdir((root / script).parent)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(str(root / script), run_name="__main__")
    except _Recorded:
        print("recorded")


if __name__ == "__main__":
    main()
