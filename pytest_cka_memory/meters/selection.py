"""Select the meter for the name of a device; there is one per device and process."""

import os
import sys
from functools import cache
from typing import TYPE_CHECKING

from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters import EMULATED, KNOWN_DEVICES, is_emulated, parse_emulated
from pytest_cka_memory.meters.base import Meter

if TYPE_CHECKING:
    from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter


def check_device_name(name: str, available: str = "cpu") -> str:
    """Return `name` if it can name a device, whether or not this machine has one.

    Args:
        name: a known device type, optionally with an index: ``cuda``, ``cuda:1``.
        available: the type that torch finds on this machine; backends outside torch have own names.

    Raises:
        DeviceError: for any other text.
    """
    kind, _, index = name.partition(":")
    known = (*KNOWN_DEVICES, available)
    if kind not in known or (":" in name and not (index.isdecimal() and kind != "auto")):
        raise DeviceError(
            f"unknown device {name!r}; write one of {', '.join(KNOWN_DEVICES)}, or e.g. 'cuda:1'"
        )
    return name


def meter_for(name: str = "auto", preferred: int | None = None) -> Meter:
    """Return the meter of a device, the same one at every call; imports torch.

    Args:
        name: as the option ``--cka-memory-device`` takes it; ``auto`` is the accelerator if there
            is one, otherwise the CPU.
        preferred: index to use if `name` has none, modulo the number of devices; the device is then
            made torch's current one. If None, torch's current device is used.

    Raises:
        DeviceError: for a device that is unknown, not available, or no longer supported.
    """
    _refuse_predicted(name)
    if is_emulated(name):
        _load_emulated(name)
        name = "cuda"
    kind = name.partition(":")[0]
    if kind == "cpu":
        check_device_name(name)
        return cpu_meter()
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    check_device_name(name, available="cpu" if accelerator is None else accelerator.type)
    if kind == "auto":
        return cpu_meter() if accelerator is None else meter_for(accelerator.type, preferred)
    if accelerator is None or accelerator.type != kind:
        available = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        can_emulate = kind == "cuda" and sys.platform == "linux" and torch.version.cuda is not None
        emulate = ", or emulate:cuda to run CUDA code without a GPU" if can_emulate else ""
        raise DeviceError(
            f"device {name!r} is not available: torch {torch.__version__} found {available} on "
            f"this machine; write cpu, or auto to use what is available{emulate}"
        )
    index = _index_of(name, preferred)
    if preferred is not None:
        # Measuring initializes CUDA, and then a DeviceMesh does not choose the rank's device.
        torch.accelerator.set_device_index(index)
    return _accelerator_meter(kind, index)


@cache
def cpu_meter() -> Meter:
    """Return the meter, the same one at every call."""
    reason = _why_not_native()
    if reason is None:
        from pytest_cka_memory.meters.cpu import BlockMeter

        return BlockMeter()
    from pytest_cka_memory.meters.storage_meter import StorageMeter

    return StorageMeter(reason)


def _why_not_native() -> str | None:
    """Return why torch's allocator cannot be counted here; None if it can."""
    from pytest_cka_memory.meters import blocks

    why_missing = blocks.why_missing()
    if why_missing is not None:
        return why_missing
    from pytest_cka_memory.meters.blocks import counter  # starts no counting if it is switched off

    if not counter.counts_cpu():
        return "this build of torch allocates memory in a way that is not known"
    return None


def _refuse_predicted(name: str) -> None:
    """Raise an error for ``predict:cuda``, which was removed; name the device to use instead."""
    if name.partition(":")[0] != "predict":
        return
    from emulated_cuda.cards import CARDS  # most sessions need no card

    card = name.removeprefix("predict:cuda")
    instead = EMULATED + (card if card[1:] in CARDS else "")
    raise DeviceError(
        f"predict:cuda was removed, and {name!r} was given; write {instead}, which runs torch's "
        "own CUDA allocator without a GPU. It requires Linux on x86-64 and a CUDA build of torch, "
        "which 'pip install torch' installs there"
    )


def _index_of(name: str, preferred: int | None) -> int:
    """Return the index of an accelerator of a kind that is available."""
    import torch

    kind, _, number = name.partition(":")
    count = torch.accelerator.device_count()
    if number:
        index = int(number)
    elif preferred is not None:
        index = preferred % count
    else:
        try:
            index = torch.accelerator.current_device_index()
        except (RuntimeError, ValueError) as error:  # ValueError: a wrong PYTORCH_ALLOC_CONF
            raise DeviceError(f"device {name!r} is not available: {error}") from error
    if index >= count:
        raise DeviceError(
            f"device {name!r} is not available: torch found {count} device(s), counted from 0; "
            f"write {kind}:0 to {kind}:{count - 1}, or {kind}"
        )
    return index


def _load_emulated(name: str) -> None:
    """Load the emulated device, unless a session has: under torchrun with a device per rank."""
    import emulated_cuda

    wanted = parse_emulated(name)
    loaded = emulated_cuda.loaded()
    if (
        loaded is None
        or loaded.card.name != wanted.card
        or loaded.devices < wanted.devices
        or (wanted.values is not None and wanted.values != (loaded.values is not False))
        or wanted.late_events != loaded.late_events
    ):
        try:
            emulated_cuda.load(
                wanted.card,
                wanted.devices,
                values=wanted.values,
                late_events=wanted.late_events,
            )
        except emulated_cuda.DeviceError as error:
            raise DeviceError(f"device {name!r} is not available: {error}") from error
    import torch

    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise DeviceError(
            f"device {name!r} is not available: CUDA_VISIBLE_DEVICES is {visible!r}, which hides "
            "it from torch; unset the variable, or set it to 0"
        )


# One meter per device and process: a reset of the peak is global, so nested regions share it.
@cache
def _accelerator_meter(kind: str, index: int) -> Meter:
    import emulated_cuda

    emulated = emulated_cuda.loaded() if kind == "cuda" else None
    from pytest_cka_memory.meters.accelerator import NoCountersError

    try:
        meter = accelerator_meter(kind, index)
    except NoCountersError as error:
        if emulated is not None:  # torch's CUDA allocator always has counters
            raise
        return _tensor_meter(kind, index, str(error))
    if emulated is not None:
        from pytest_cka_memory.meters.accelerator.emulated import label_emulated

        label_emulated(meter, emulated, index)
    return meter


def accelerator_meter(kind: str, index: int) -> "AcceleratorMeter":
    """Return a new meter that reads an allocator's counters, and counts its blocks if it can.

    Args:
        kind: the type of the device: ``cuda``, ``xpu``.
        index: its number, from 0.

    Raises:
        DeviceError: if the device cannot be used.
        NoCountersError: if its allocator has no such counters.
    """
    import torch

    from pytest_cka_memory.meters.accelerator import AllocatorStats
    from pytest_cka_memory.meters.accelerator.by_blocks import block_meter, why_not_counted
    from pytest_cka_memory.meters.accelerator.by_storages import AcceleratorStorageMeter

    device = torch.device(kind, index)
    stats = AllocatorStats(device)
    stats.check()
    by_blocks = block_meter(device, stats)
    return by_blocks or AcceleratorStorageMeter(device, stats, why_not_counted(device))


def _tensor_meter(kind: str, index: int, reason: str) -> Meter:
    import torch

    from pytest_cka_memory.meters.accelerator.by_storages import TensorMeter

    return TensorMeter(torch.device(kind, index), reason)
