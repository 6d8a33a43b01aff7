"""Read a device's memory. Only this package asks a device anything.

:class:`Meter` and :class:`Reading` are public, for plugins that bring a meter of their own. The
module itself has the names of devices that ``--cka-memory-device`` takes; every session imports it
for its help. That of an emulated device is
``emulate:cuda[:CARD][,values=off][,devices=N][,events=late]``.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.errors import DeviceError

if TYPE_CHECKING:
    from pytest_cka_memory.meters.base import Meter, Reading

__all__ = ["Meter", "Reading"]


def __getattr__(name: str) -> Any:
    # Imported when asked for, because every session imports a module of this package.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_cka_memory.meters import base

    return getattr(base, name)


EMULATED = "emulate:cuda"
"""The name of the emulated device with the default card."""
KNOWN_DEVICES = (
    *("auto", "cpu", "cuda", "xpu", "mps", "hpu", "npu", "privateuseone"),
    EMULATED,
)


@dataclass(frozen=True)
class Specification:
    """What an emulated device's name asks for."""

    card: str
    devices: int = 1
    """Number of such cards."""
    values: bool | None = None
    """Whether values are asked for; None if the name says nothing: then they are computed."""
    late_events: bool = False
    """Whether an event is done only when the host must know that it is."""


def is_emulated(name: str) -> bool:
    """Whether a device's name is that of an emulated device, valid or not."""
    return name.partition(",")[0] == EMULATED or name.startswith(f"{EMULATED}:")


def parse_emulated(name: str) -> Specification:
    """Return what the name of an emulated device asks for.

    Raises:
        DeviceError: if the card or a setting is not known.
    """
    from emulated_cuda.cards import CARDS, DEFAULT_CARD  # few sessions need a card
    from emulated_cuda.loading.library import MOST_DEVICES

    device, *settings = name.split(",")
    if device != EMULATED and not device.startswith(f"{EMULATED}:"):
        raise DeviceError(
            f"{name!r} is not an emulated device; write {EMULATED} or {EMULATED}:a100"
        )
    values: bool | None = None
    devices = 1
    late_events = False
    for setting in settings:
        key, _, value = setting.partition("=")
        if setting in ("values=on", "values=off"):
            values = value == "on"
        elif setting in ("events=late", "events=at-once"):
            late_events = value == "late"
        elif setting == "devices=auto":
            devices = _ranks_on_this_machine()
        elif key == "devices" and value.isdecimal() and 1 <= int(value) <= MOST_DEVICES:
            devices = int(value)
        else:
            raise DeviceError(
                f"unknown setting {setting!r} of the device {name!r}; write values=off, "
                f"events=late, devices=auto or devices=N, with N from 1 to {MOST_DEVICES}"
            )
    card = device[len(EMULATED) + 1 :] or DEFAULT_CARD
    if card not in CARDS:
        raise DeviceError(
            f"unknown card {card!r}; write {EMULATED}, or {EMULATED}: and one of {', '.join(CARDS)}"
        )
    return Specification(card, devices, values, late_events)


def _ranks_on_this_machine() -> int:
    """Return how many ranks torchrun or another launcher has started here; 1 without one."""
    processes = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return int(processes) if processes.isdecimal() else 1
