"""Running under pytest-xdist: who this process is, and which GPU it takes."""

import os
import sys
from pathlib import Path

import pytest


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for a controller."""
    return hasattr(config, "workerinput")


def is_controller(config: pytest.Config) -> bool:
    """Whether this process only hands tests out, and must not touch a device."""
    return not is_worker(config) and getattr(config.option, "dist", "no") != "no"


def check_device(config: pytest.Config, device: str) -> None:
    """Find out in a process of its own whether `device` is there: the controller starts no GPU.

    Raises:
        pytest.UsageError: where it is not; a worker could only crash over it.
    """
    if config.option.collectonly or len(config.hook.pytest_cka_memory_meter.get_hookimpls()) > 1:
        return  # nothing to measure, or another plugin answers for the device
    import subprocess

    code = "import sys; from pytest_cka_memory.meters import meter_for; meter_for(sys.argv[1])"
    asked = subprocess.run(
        [sys.executable, "-c", code, device], capture_output=True, text=True, check=False
    )
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
        raise pytest.UsageError(f"--cka-memory-device: {last.partition(': ')[2] or last}")


def take_gpu(config: pytest.Config) -> None:
    """Give each worker one of the caller's GPUs in turn, before CUDA starts in it."""
    visible = visible_gpus()
    if is_worker(config) and visible:
        sent: dict[str, str] = config.workerinput  # type: ignore[attr-defined]  # set by xdist
        number = int(sent["workerid"].removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number % len(visible)]


def visible_gpus() -> list[str]:
    """The GPUs the caller may use, found without a CUDA call."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip()]
    found = Path("/proc/driver/nvidia/gpus")
    return [str(index) for index, _ in enumerate(found.iterdir())] if found.is_dir() else []
