"""The name of an emulated device: ``emulate:cuda[:CARD][,values=off][,devices=N]``."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_cka_memory.errors import DeviceError

if TYPE_CHECKING:  # every session imports this module, and few need a card
    from pytest_cka_memory.core.cards import Card

EMULATED = "emulate:cuda"
"""The name of the emulated device with the default card."""
MOST_DEVICES = 16
_ON = ("1", "true", "on", "yes", "y")
"""What Triton takes for a switch that is on, in lower case."""


@dataclass(frozen=True)
class Specification:
    """What an emulated device's name asks for."""

    card: "Card"
    devices: int = 1
    """Number of such cards."""
    values: bool | None = None
    """Whether values are asked for; None if the name says nothing: then they are computed."""

    @property
    def name(self) -> str:
        """The name without its settings: ``emulate:cuda:CARD``."""
        return f"{EMULATED}:{self.card.name}"

    @property
    def title(self) -> str:
        """The device as every report names it; it says that there is no GPU."""
        return f"emulated {self.card.title} (no GPU)"


def is_emulated(name: str) -> bool:
    """Whether a device's name is that of an emulated device, valid or not."""
    return name.partition(",")[0] == EMULATED or name.startswith(f"{EMULATED}:")


def interpreter_warning() -> str | None:
    """Return a warning if the environment lets Triton interpret kernels; None if it does not.

    Its interpreter stores bfloat16 as integers of 16 bits, which ``tl.dot`` multiplies as such.
    """
    if os.environ.get("TRITON_INTERPRET", "").lower() not in _ON:
        return None
    return (
        "TRITON_INTERPRET is set: Triton's interpreter computes products of bfloat16 wrongly, and "
        "without an error, so values that its kernels write may be wrong; unset it"
    )


def parse(name: str) -> Specification:
    """Return what the name of an emulated device asks for.

    Raises:
        DeviceError: if the card or a setting is not known.
    """
    from pytest_cka_memory.core.cards import card_of

    device, *settings = name.split(",")
    if device != EMULATED and not device.startswith(f"{EMULATED}:"):
        raise DeviceError(
            f"{name!r} is not an emulated device; write {EMULATED} or {EMULATED}:a100"
        )
    values: bool | None = None
    devices = 1
    for setting in settings:
        key, _, value = setting.partition("=")
        if setting in ("values=on", "values=off"):
            values = value == "on"
        elif key == "devices" and value.isdecimal() and 1 <= int(value) <= MOST_DEVICES:
            devices = int(value)
        else:
            raise DeviceError(
                f"unknown setting {setting!r} of the device {name!r}; write values=off, or "
                f"devices= and a number from 1 to {MOST_DEVICES}"
            )
    return Specification(card_of(device[len(EMULATED) + 1 :]), devices, values)
