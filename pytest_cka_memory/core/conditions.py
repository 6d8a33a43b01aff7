"""What the figures of a region depend on besides the code that was measured."""

from collections.abc import Iterable, Mapping
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


Conditions = tuple[tuple[str, str], ...]
"""Name of a fact and its value, sorted."""

USUAL = "default"
"""The value of a fact that is left out."""

FACTS: Mapping[str, str] = {
    "threads": "threads",
    "instruction_set": "instruction set",
    "processor": "processor",
    "onednn": "oneDNN",
    "blas": "BLAS",
    "cudnn": "cuDNN",
    "cublas": "cuBLAS settings",
    "allocator": "allocator settings",
    "tf32": "precision of float32 products",
    "deterministic": "deterministic mode",
    "compile": "settings of torch.compile",
}
"""Name in files -> what messages call it."""

OF_OPERATORS = ("onednn", "deterministic", "compile")
"""What decides which operators run."""
OF_SCRATCH = tuple(FACTS)
"""What decides how much memory operators and the allocator need besides."""


class Changed(NamedTuple):
    """A fact that two measurements do not share."""

    fact: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{FACTS.get(self.fact, self.fact)} {self.old} -> {self.new}"


def conditions_of(facts: Mapping[str, Any]) -> Conditions | None:
    """Return the conditions in the facts of a session or meter; None if none are recorded."""
    conditions = facts.get("conditions")
    return tuple(sorted(conditions.items())) if conditions else None


def machines_of(
    facts: Mapping[str, Mapping[str, Any]],
) -> dict[str, tuple[Fingerprint, Conditions | None]]:
    """Return for each worker what its figures depend on: the cards of workers may differ.

    Args:
        facts: worker -> the facts of its meter.
    """
    return {worker: (fingerprint_of(own), conditions_of(own)) for worker, own in facts.items()}


def changed(old: Conditions | None, new: Conditions | None) -> tuple[Changed, ...]:
    """Return the facts with different values; none if one side was not recorded."""
    if old is None or new is None:
        return ()
    before, after = dict(old), dict(new)
    return tuple(
        Changed(fact, before.get(fact, USUAL), after.get(fact, USUAL))
        for fact in {**FACTS, **before, **after}
        if before.get(fact, USUAL) != after.get(fact, USUAL)
    )


def listed(facts: Iterable[Changed]) -> str:
    """Return facts as one text."""
    return ", ".join(map(str, facts))
