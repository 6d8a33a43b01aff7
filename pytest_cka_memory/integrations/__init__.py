"""Other programs that run or show a session: pytest-xdist, torchrun, GitHub Actions.

This module itself says which of several processes this is: xdist's workers and torchrun's ranks,
and the GPU of each. xdist carries what workers have measured on the reports of their tests, which
:mod:`pytest_cka_memory.plugin.reporter` reads; ranks exchange it by :mod:`.torchrun`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the callbacks of training frameworks, in this package, need no pytest
    import pytest


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker, which runs tests for a controller."""
    return hasattr(config, "workerinput")


def is_controller(config: pytest.Config) -> bool:
    """Whether this process only distributes tests to workers; it must not use a device."""
    return not is_worker(config) and getattr(config.option, "dist", "no") != "no"


def check_device(config: pytest.Config, device: str, given_by: str) -> None:
    """Check in another process that `device` is available: the controller must not start CUDA.

    `given_by` is the option or ini key that names the device, for the message.

    Raises:
        pytest.UsageError: if it is not available; a worker could only report it by crashing.
    """
    if config.option.collectonly or len(config.hook.pytest_cka_memory_meter.get_hookimpls()) > 1:
        return  # nothing is measured, or another plugin may provide the device
    import subprocess

    import pytest

    code = (
        "import sys; from pytest_cka_memory.meters.selection import meter_for; "
        "meter_for(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, device], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise pytest.UsageError(f"{given_by}: {last.partition(': ')[2] or last}")


def take_gpu(config: pytest.Config) -> None:
    """Let each worker see one of the visible GPUs, in turn; called before CUDA starts in it."""
    visible = visible_gpus()
    if is_worker(config) and visible:
        worker_input: dict[str, str] = config.workerinput  # type: ignore[attr-defined]  # set by xdist
        number = int(worker_input["workerid"].removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number % len(visible)]


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    They are found without a call of CUDA.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip()]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(index) for index, _ in enumerate(folder.iterdir())] if folder.is_dir() else []


class Rank(NamedTuple):
    """One process of a job that torchrun started."""

    number: int
    """From 0, over all machines."""
    world_size: int
    """Number of ranks."""
    local: int
    """From 0, on this machine."""
    attempt: str
    """How often torchrun has restarted the ranks; separates their data from earlier attempts."""

    @property
    def name(self) -> str:
        """The rank as reports write it."""
        return f"rank {self.number}"


def this_rank(environ: Mapping[str, str] = os.environ) -> Rank | None:
    """Return the rank of this process; None outside torchrun, and if there is only one rank.

    ``RANK`` and ``WORLD_SIZE`` alone are not enough: clusters set them in every process of a job.
    """
    if "TORCHELASTIC_RUN_ID" not in environ or int(environ.get("WORLD_SIZE", "1")) < 2:
        return None
    return Rank(
        number=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local=int(environ["LOCAL_RANK"]),
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
