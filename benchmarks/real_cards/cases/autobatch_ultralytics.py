"""YOLOv8n at 480 pixels, batches of 1 to 16, as AutoBatch tries them: the reserve after each."""

import gc
from typing import Any

from case import CUBLAS_BEFORE_2_7, Case, Figure

# Batch -> GB (10**9 bytes) that are reserved after three passes.
PUBLISHED = {1: "0.285", 2: "0.445", 4: "0.470", 8: "0.719", 16: "1.197"}

CAUSE = (
    "what ran before: 0.22 GiB were reserved when the first batch began, 0.04 GiB here; and the "
    "workspaces of another version of cuDNN"
)

CASE = Case(
    title="YOLOv8n with one class, 480 pixels, autocast to float16",
    source="https://github.com/ultralytics/ultralytics/issues/1451",
    kind="vision",
    card="rtx4090",
    real="RTX 4090 (23.99 GiB, Windows); March 2023, the versions are not named",
    torch="2.0",
    rebuilt=("The versions, and what ran before the first batch."),
    figures={
        f"batch {batch}": Figure(printed, "GB", "reserved", cause=CAUSE)
        for batch, printed in PUBLISHED.items()
    },
    needs=("ultralytics", "torchvision"),
    environment=CUBLAS_BEFORE_2_7,
    differs=(
        "The check of mixed precision, which ran before and whose model stays, is two passes on "
        "640 x 480 pixels here. The network is that of ultralytics 8.4."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Check mixed precision, then pass forward and backward three times for each batch."""
    import copy

    import torch

    trained = _model(1)
    checked = _model(80).eval()
    with torch.no_grad():
        for enabled in (False, True):
            with torch.autocast("cuda", enabled=enabled):
                checked(torch.empty(1, 3, 640, 480, device="cuda"))
    found = {}
    with torch.autocast("cuda"):
        model = copy.deepcopy(trained).train()
        gc.collect()
        torch.cuda.empty_cache()
        for batch in PUBLISHED:
            images = torch.empty(batch, 3, 480, 480).to("cuda")
            images.requires_grad = True
            model(images)  # its operations are counted
            for _ in range(3):
                _sum(model(images)).backward()
            found[f"batch {batch}"] = torch.cuda.memory_reserved()
    return found


def _sum(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, list | tuple):
        return sum(_sum(output) for output in outputs)
    return outputs.sum()


def _model(classes: int) -> Any:
    from ultralytics.nn.tasks import DetectionModel

    return DetectionModel("yolov8n.yaml", nc=classes, verbose=False).to("cuda")
