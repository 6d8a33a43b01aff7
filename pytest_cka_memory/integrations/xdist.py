"""pytest-xdist: whether this process is the controller or a worker, and which GPU it uses."""

import os
import sys
from pathlib import Path

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
        given: dict[str, str] = config.workerinput  # type: ignore[attr-defined]  # set by xdist
        number = int(given["workerid"].removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number % len(visible)]


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    They are found without a call of CUDA.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip()]
    found = Path("/proc/driver/nvidia/gpus")
    return [str(index) for index, _ in enumerate(found.iterdir())] if found.is_dir() else []
