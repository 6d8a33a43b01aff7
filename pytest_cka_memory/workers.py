"""Running under pytest-xdist: who this process is, and which GPU it takes."""

import os
from pathlib import Path
from typing import Any

import pytest


def worker_input(config: pytest.Config) -> dict[str, Any] | None:
    """What the controller sent, in a worker; None in a controller or a run without xdist."""
    return getattr(config, "workerinput", None)


def is_controller(config: pytest.Config) -> bool:
    """Whether this process only hands tests out, and must not touch a device."""
    return worker_input(config) is None and getattr(config.option, "dist", "no") != "no"


def take_gpu(config: pytest.Config) -> None:
    """Give each worker one of the caller's GPUs in turn, before CUDA starts in it."""
    sent = worker_input(config)
    if sent is None:
        return
    number = int("".join(filter(str.isdecimal, str(sent["workerid"]))) or 0)
    visible = visible_gpus()
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number % len(visible)]


def visible_gpus() -> list[str]:
    """The GPUs the caller may use, found without a CUDA call."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip()]
    found = Path("/proc/driver/nvidia/gpus")
    return [str(index) for index, _ in enumerate(found.iterdir())] if found.is_dir() else []
