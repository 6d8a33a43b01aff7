"""Run a network while the CPU meter and an independent counter both count.

After each stage both give their live bytes and their peak. No garbage is collected before. With
``CKA_MEMORY_NATIVE=0`` the meter is the ledger, whose peak is a lower bound.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models

sys.path.append(str(Path(__file__).parents[1] / "tests" / "backend"))
from hostcounter import HostCounter

from pytest_cka_memory.meters.selection import meter_for

BATCH = 2
IMAGE_SIZE = 64
IMAGE_SIZES = {
    "inception_v3": 299,
    **dict.fromkeys(("raft_large", "raft_small"), 128),
    **dict.fromkeys(("maxvit_t", "mvit_v1_b", "mvit_v2_s", "s3d"), 224),
}
CLASSES = 10
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"vit_{name}": {"image_size": IMAGE_SIZE} for name in ("b_16", "b_32", "l_16", "l_32")},
}


def kind_of(name: str) -> str:
    """Return the part of torchvision that has the network, e.g. ``detection``."""
    module = models.get_model_builder(name).__module__
    part = module.removeprefix("torchvision.models.").split(".")[0]
    return part if part in ("detection", "segmentation", "video", "optical_flow") else "image"


def build(name: str) -> nn.Module:
    """Return the network with random weights, and with ten classes if it classifies."""
    options = OPTIONS.get(name, {})
    if kind_of(name) in ("detection", "segmentation"):
        options = {"weights_backbone": None, **options}
    if kind_of(name) != "optical_flow":
        options = {"num_classes": CLASSES, **options}
    if kind_of(name) == "detection" and "ssd" not in name:
        options |= {"min_size": 128, "max_size": 128}
    return models.get_model(name, weights=None, **options)


def inputs(name: str, *, training: bool) -> tuple[Any, ...]:
    """Return a batch of noise, with targets if a detector is trained."""
    size = IMAGE_SIZES.get(name, IMAGE_SIZE)
    kind = kind_of(name)
    if kind == "video":
        return (torch.rand(BATCH, 3, 16, size, size),)
    if kind == "optical_flow":
        return torch.rand(BATCH, 3, size, size), torch.rand(BATCH, 3, size, size)
    if kind != "detection":
        return (torch.rand(BATCH, 3, size, size),)
    images = [torch.rand(3, 2 * size, 2 * size) for _ in range(BATCH)]
    return (images, [target(2 * size) for _ in images]) if training else (images,)


def target(size: int) -> dict[str, torch.Tensor]:
    """Return a target with one object in the middle, its mask and its keypoints."""
    found = torch.zeros(1, size, size, dtype=torch.uint8)
    found[:, size // 4 : size // 2, size // 4 : size // 2] = 1
    return {
        "boxes": torch.tensor([[size / 4, size / 4, size / 2, size / 2]]),
        "labels": torch.tensor([1]),
        "masks": found,
        "keypoints": torch.full((1, 17, 3), size / 3),
    }


def total(result: Any) -> torch.Tensor:
    """Return a loss from anything that a network returns."""
    if isinstance(result, torch.Tensor):
        return result.float().square().mean()
    values = result.values() if isinstance(result, dict) else result
    return torch.stack([total(value) for value in values]).sum()


def check(name: str, counter: HostCounter) -> list[dict[str, Any]]:
    """Return both counts of one network at each stage, in bytes above those at the start."""
    torch.manual_seed(0)
    meter = meter_for("cpu")
    meter.clean()
    meter.start()
    base = meter.read().allocated_bytes, counter.live_bytes
    held: dict[str, Any] = {}
    stages = []

    def stage(label: str, action: Callable[[], object]) -> None:
        meter.read()  # so that what only a reading finds counts in the stage before
        meter.reset_peak()
        counter.reset_peak()
        action()
        live = counter.live_bytes
        reading = meter.read()
        stages.append(
            {
                "stage": label,
                "live_bytes": reading.allocated_bytes - base[0],
                "counted_live_bytes": live - base[1],
                "peak_bytes": reading.peak_bytes - base[0],
                "counted_peak_bytes": counter.peak_bytes - base[1],
            }
        )

    def evaluate() -> None:
        with torch.no_grad():
            held["result"] = held["model"].eval()(*inputs(name, training=False))

    def train() -> None:
        del held["result"]
        held["loss"] = total(held["model"].train()(*inputs(name, training=True)))

    def step() -> None:
        held["optimizer"] = torch.optim.SGD(held["model"].parameters(), lr=1e-6, momentum=0.9)
        held["optimizer"].step()

    stage("build", lambda: held.update(model=build(name)))
    stage("evaluate", evaluate)
    stage("forward", train)
    stage("backward", lambda: held["loss"].backward())
    stage("step", step)
    stage("release", lambda: (held.clear(), meter.clean()))
    meter.stop()
    return stages
