"""What the figures of a region depend on besides the code that was measured."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple


class Fingerprint(NamedTuple):
    """Device, meter and versions: figures are compared only if these are equal."""

    device: str
    """The model of an accelerator; ``cpu`` for every CPU, because figures do not depend on it."""
    meter: str
    """What measured."""
    torch: str | None = None
    """Major and minor version, such as ``2.15``; None if torch is not installed."""
    cuda: str | None = None
    """Major and minor version; None on other devices."""

    def __str__(self) -> str:
        torch = f"torch {self.torch}" if self.torch else "no torch"
        cuda = [f"CUDA {self.cuda}"] if self.cuda else []
        return ", ".join([self.device, self.meter, torch, *cuda])


def fingerprint_of(facts: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of a session's or a meter's facts.

    The CPU's model is left out: the meter counts tensor storages, which have the same size on
    every CPU.
    """
    on_cpu = facts["device"] == "cpu"
    return Fingerprint(
        device="cpu" if on_cpu else facts["device_name"],
        meter=facts["meter"],
        torch=_minor(facts["torch"] or installed_torch()),
        cuda=_minor(facts["cuda"]),
    )


@cache
def installed_torch() -> str | None:
    """Return the installed version, because whether a test has imported torch must not matter."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _minor(number: str | None) -> str | None:
    return None if number is None else ".".join(number.split("+")[0].split(".")[:2])
