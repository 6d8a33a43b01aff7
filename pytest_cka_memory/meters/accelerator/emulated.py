"""The meter of an emulated CUDA device: torch's own allocator, labelled as having no GPU."""

from typing import Any

from pytest_cka_memory.emulated.loading import Loaded
from pytest_cka_memory.emulated.specification import EMULATED
from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter


class EmulatedMeter(AcceleratorMeter):
    """Reads the counters of torch's CUDA allocator on a device that is emulated in host memory.

    Args:
        emulated: what this process emulates.
        index: number of the device, from 0.
    """

    notes = (
        "EMULATED, not measured on a GPU: torch's CUDA build and its allocator ran, no kernel did;",
        "values on the device are zeros or stale, and so are sizes that depend on them (nonzero,",
        "unique, boolean masks). Assumed: batch normalization takes no cuDNN workspace; workspaces",
        "of cuFFT and cuSOLVER are not known",
        *AcceleratorMeter.notes,
    )

    def __init__(self, emulated: Loaded, index: int) -> None:
        super().__init__("cuda", index)
        self._torch_name = self.device
        self.device = f"{EMULATED}:{emulated.card.name}"
        if emulated.devices > 1:
            self.device += f", device {index} of {emulated.devices}"
            self.notes = (
                *self.notes,
                f"memory on emulated devices other than {self._torch_name} is not counted",
            )
        self.device_name = emulated.title
        self.name += ", emulated device"

    @property
    def torch_device(self) -> str:
        return self._torch_name

    def facts(self) -> dict[str, Any]:
        import torch

        return {**super().facts(), "cuda": torch.version.cuda}
