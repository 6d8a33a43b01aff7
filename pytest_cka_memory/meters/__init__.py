"""The seam to the devices. Nothing outside this folder asks a device anything.

Importing this package imports no torch: that waits until a device is measured.
"""

from functools import cache

from pytest_cka_memory.core.markers import KNOWN_DEVICES
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters.base import Meter, Reading
from pytest_cka_memory.meters.predicted.cards import card_of

__all__ = ["KNOWN_DEVICES", "Meter", "Reading", "check_device_name", "meter_for"]

_PREDICTED = "predict:cuda"


def check_device_name(name: str, found: str = "cpu") -> str:
    """Return `name` if it can be a device, without asking whether this machine has it.

    It can be one of the known, or of the type that torch has `found`: a backend from outside torch
    may have any name.

    Raises:
        DeviceError: for anything but a known type, optionally with an index.
    """
    kind, _, index = name.partition(":")
    known = (*KNOWN_DEVICES, found)
    if kind not in known or (":" in name and not (index.isdecimal() and kind != "auto")):
        raise DeviceError(
            f"unknown device {name!r}; write one of {', '.join(KNOWN_DEVICES)}, or e.g. 'cuda:1'"
        )
    return name


def meter_for(name: str = "auto", preferred: int | None = None) -> Meter:
    """Return this process's one meter for a device; ``auto`` is the accelerator, else the CPU.

    Where `name` has no index, that is `preferred`, counted around the devices there are; without
    it, torch's current device.

    Raises:
        DeviceError: for a device that is unknown, not there, or keeps no counters.
    """
    if _is_predicted(name):
        return _predicted_meter(card_of(name[len(_PREDICTED) + 1 :]).name)
    kind, _, index = name.partition(":")
    if kind == "cpu":
        check_device_name(name)
        return _cpu_meter()
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    check_device_name(name, found="cpu" if accelerator is None else accelerator.type)
    if kind == "auto":
        return _cpu_meter() if accelerator is None else meter_for(accelerator.type, preferred)
    if accelerator is None or accelerator.type != kind:
        has = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        raise DeviceError(
            f"device {name!r} is not there: torch {torch.__version__} finds {has} on this machine; "
            "write cpu, or auto to take what there is"
        )
    count = torch.accelerator.device_count()
    if index:
        number = int(index)
    elif preferred is not None:
        number = preferred % count
    else:
        number = torch.accelerator.current_device_index()
    if number >= count:
        raise DeviceError(f"device {name!r} is not there: torch finds {count}, counted from 0")
    return _accelerator_meter(kind, number)


# One meter a device and process: peaks are reset globally, so nested regions must share one.
@cache
def _cpu_meter() -> Meter:
    from pytest_cka_memory.meters.cpu import CpuMeter

    return CpuMeter()


@cache
def _accelerator_meter(kind: str, index: int) -> Meter:
    from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter

    return AcceleratorMeter(kind, index)


def _is_predicted(name: str) -> bool:
    return name == _PREDICTED or name.startswith(f"{_PREDICTED}:")


@cache
def _predicted_meter(card: str) -> Meter:
    from pytest_cka_memory.meters.predicted.meter import PredictedMeter

    return PredictedMeter(card_of(card))
