"""The peaks of networks of torchvision in this process, with scratch memory and without it."""

import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from crosscheck_one import build, inputs, total
from torchvision import models

from pytest_cka_memory import MemoryProbe

PROBE = MemoryProbe("cpu")


def peaks(action: Callable[[], Any]) -> tuple[list[int | None], Any]:
    """Return both peaks above the level before, and the result."""
    gc.collect()
    with PROBE.measure("action") as region:
        result = action()
    return [region.peak_increase_bytes, region.increase_without_scratch_bytes], result


def main() -> None:
    """Measure an evaluation, a forward and a backward pass of each network."""
    names = [name for name in models.list_models() if not name.startswith("quantized")]
    found = {}
    for name in names[:: int(sys.argv[1])]:
        if name == "vit_h_14":  # 2.5 GB of parameters, and no images of 64 x 64
            continue
        torch.manual_seed(0)
        model = build(name)
        data = inputs(name, training=False)
        with torch.no_grad():
            found[f"{name} evaluation"], _ = peaks(partial(model.eval(), *data))
        data = inputs(name, training=True)
        found[f"{name} forward"], result = peaks(partial(model.train(), *data))
        loss = total(result)
        del result
        found[f"{name} backward"], _ = peaks(loss.backward)
        del model, data, loss
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
