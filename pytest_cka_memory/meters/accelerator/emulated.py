"""Label a meter as that of an emulated CUDA device: torch's own allocator runs, without a GPU."""

from emulated_cuda import activation
from emulated_cuda.loading.loaded import Loaded, loaded
from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter
from pytest_cka_memory.meters.device_names import EMULATED

_NO_GPU = (
    "EMULATED, not measured on a GPU: torch's CUDA build and its allocator ran, no kernel did",
    "assumed: batch normalization takes no cuDNN workspace; not known: workspaces of cuFFT, "
    "cuSOLVER, cuSPARSE and cuDNN's recurrent layers, and the latter's reserve",
)
_COMPUTED = (
    "values on the device are computed by torch on the CPU: not by a card's kernels, and not in "
    "its time",
)
_NOT_COMPUTED = (
    "no values are computed: those on the device are zeros or stale, and so are sizes that depend "
    "on them (nonzero, unique, boolean masks)",
)


def label_emulated(meter: AcceleratorMeter, emulated: Loaded, index: int) -> None:
    """Say in the name, device and notes of a meter that its device is emulated in host memory.

    Args:
        meter: reads the counters of torch's CUDA allocator.
        emulated: what this process emulates.
        index: number of the device, from 0.
    """
    values = _COMPUTED if activation.are_computed() else _NOT_COMPUTED
    warnings = (f"warning: {warning}" for warning in activation.warnings())
    # First of all: a reader must not take these figures for those of a GPU.
    meter.notes = (*_NO_GPU, *meter.notes, *values, *warnings)
    meter.device = f"{EMULATED}:{emulated.card.name}"
    if emulated.devices > 1:
        meter.device += f", device {index} of {emulated.devices}"
        others = f"memory on emulated devices other than {meter.torch_device} is not counted"
        meter.notes = (*meter.notes, others)
    meter.device_name = emulated.title
    meter.name += ", emulated device"


def emulated_cards() -> int:
    """Return how many cards this process emulates; 1 if it emulates none."""
    emulated = loaded()
    return 1 if emulated is None else emulated.devices


def computes_values() -> bool:
    """Whether tensors on devices have values: they have none on one that is emulated without."""
    return loaded() is None or activation.are_computed()
