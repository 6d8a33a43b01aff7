"""What is different on an emulated CUDA device: the label of its meter, and unknown sizes.

torch's own allocator runs there, without a GPU. On an emulated card without values, the number of
elements that a mask selects is not that of a real run, and what the code allocates for them is
wrong without a sign of it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from emulated_cuda import activation
from emulated_cuda.loading.loaded import Loaded, loaded
from pytest_cka_memory.meters import EMULATED
from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter
from pytest_cka_memory.meters.torch_keepers import saves_for_backward
from pytest_cka_memory.meters.torch_private import TorchDispatchMode

_NO_GPU = (
    "EMULATED, not measured on a GPU: torch's CUDA build and its allocator ran, but no CUDA "
    "kernel did",
    "the sizes of workspaces are not known for cuSPARSE, and for some operators of cuFFT and "
    "cuSOLVER; for cuDNN's recurrent layers they come from a formula fitted to measurements; for "
    "convolutions, cuDNN on a card may choose another plan",
)
_COMPUTED = (
    "torch computes the values on the CPU, not with a card's kernels and not at a card's speed",
)
_NOT_COMPUTED = (
    "no values are computed: tensors on the device hold zeros or stale values, so sizes "
    "that depend on values (nonzero, unique, boolean masks) may be wrong",
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
    """Whether tensors on devices have values; an emulated device may be set to compute none."""
    return loaded() is None or activation.are_computed()


_OF_VALUES = {
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_consecutive", "unique_dim"),
    *("unique_dim_consecutive", "bincount", "nms", "repeat_interleave"),
}
"""Operators whose results have a size that depends on values."""
_OF_MASKS = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""The same if they get a mask as index."""
_READS = {"_local_scalar_dense", "_to_copy", "copy_"}
"""Operators that read values; of integers, which may be numbers of something."""
_INTERNAL = tuple(
    str(Path(file).parent)
    for file in (torch.__file__, sys.modules["pytest_cka_memory"].__file__)
    if file is not None
)


class _Watch(TorchDispatchMode):
    """Notes the lines at which sizes depend on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        # What is saved for backward comes back as it was.
        if _depends_on_values(name, args, result) and not saves_for_backward():
            self.found.setdefault(f"{name} at {_line()}")
        return result


def _depends_on_values(name: str, args: Any, result: Any) -> bool:
    if name in _OF_VALUES:
        # With a stated size, repeat_interleave reads nothing; nor does any on the CPU.
        return any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
    if name in _OF_MASKS:
        masks = (index for index in args[1] if isinstance(index, torch.Tensor))
        return any(each.is_cuda and each.dtype in (torch.bool, torch.uint8) for each in masks)
    if name not in _READS:
        return False
    source = args[1] if name == "copy_" else args[0]
    is_read = (
        isinstance(source, torch.Tensor)
        and source.is_cuda
        and not source.is_floating_point()
        and not source.is_complex()
        and source.dtype != torch.bool
    )
    target = args[0] if name == "copy_" else result
    return is_read and (not isinstance(target, torch.Tensor) or not target.is_cuda)


def _line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"


@contextmanager
def unknown_sizes() -> Iterator[Callable[[], list[str]]]:
    """Watch the code in this context; yield a function that returns the lines that were found.

    They are empty if values are computed, or on a real device.
    """
    if computes_values():
        yield list
        return
    with _Watch() as watch:
        yield lambda: list(watch.found)
