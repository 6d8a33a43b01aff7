"""The name of an emulated device: ``emulate:cuda[:CARD][,values=off]``."""

from dataclasses import dataclass

from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters.predicted.cards import Card, card_of

EMULATED = "emulate:cuda"
"""The name of the emulated device with the default card."""


@dataclass(frozen=True)
class Specification:
    """What an emulated device's name asks for."""

    card: Card
    values: bool | None = None
    """Whether values are asked for; None if the name says nothing. None are computed yet."""

    @property
    def name(self) -> str:
        """The name without its settings: ``emulate:cuda:CARD``."""
        return f"{EMULATED}:{self.card.name}"

    @property
    def title(self) -> str:
        """The device as every report names it, so that nobody takes it for a GPU."""
        return f"emulated {self.card.title} (no GPU)"


def is_emulated(name: str) -> bool:
    """Whether a device's name is that of an emulated device, valid or not."""
    return name.partition(",")[0] == EMULATED or name.startswith(f"{EMULATED}:")


def parse(name: str) -> Specification:
    """Return what the name of an emulated device asks for.

    Raises:
        DeviceError: if the card or a setting is not known.
    """
    device, *settings = name.split(",")
    if device != EMULATED and not device.startswith(f"{EMULATED}:"):
        raise DeviceError(
            f"{name!r} is not an emulated device; write {EMULATED} or {EMULATED}:a100"
        )
    values: bool | None = None
    for setting in settings:
        if setting not in ("values=on", "values=off"):
            raise DeviceError(
                f"unknown setting {setting!r} of the device {name!r}; "
                f"write values=off, or leave it out"
            )
        values = setting == "values=on"
    if values:
        raise DeviceError(
            f"the emulated device computes no values yet, and {name!r} asks for them; "
            f"write {device},values=off, or measure on a GPU"
        )
    return Specification(card_of(device[len(EMULATED) + 1 :], EMULATED), values)
