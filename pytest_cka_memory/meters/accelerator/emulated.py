"""The meter of an emulated CUDA device: torch's own allocator, labelled as having no GPU."""

from typing import Any

from emulated_cuda import activation
from emulated_cuda.loading.loaded import Loaded
from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter
from pytest_cka_memory.meters.device_names import EMULATED

_COMPUTED = (
    "values on the device are computed by torch on the CPU: not by a card's kernels, and not in "
    "its time",
)
_NOT_COMPUTED = (
    "no values are computed: those on the device are zeros or stale, and so are sizes that depend "
    "on them (nonzero, unique, boolean masks)",
)


class EmulatedMeter(AcceleratorMeter):
    """Reads the counters of torch's CUDA allocator on a device that is emulated in host memory.

    Args:
        emulated: what this process emulates.
        index: number of the device, from 0.
    """

    notes = (
        "EMULATED, not measured on a GPU: torch's CUDA build and its allocator ran, no kernel did",
        "assumed: batch normalization takes no cuDNN workspace; not known: workspaces of cuFFT, "
        "cuSOLVER, cuSPARSE and cuDNN's recurrent layers, and the latter's reserve",
        *AcceleratorMeter.notes,
    )

    def __init__(self, emulated: Loaded, index: int) -> None:
        super().__init__("cuda", index)
        values = _COMPUTED if activation.are_computed() else _NOT_COMPUTED
        warnings = (f"warning: {warning}" for warning in activation.warnings())
        self.notes = (*self.notes, *values, *warnings)
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
