"""The registry of facts that figures depend on, besides the device and the versions of libraries.

A meter reads them once (:mod:`pytest_cka_memory.meters.conditions`), a row of the registry of
figures names those that its figure depends on, and every comparison asks :func:`changed`. A fact
with its usual value is left out.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

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
    found = facts.get("conditions")
    return tuple(sorted(found.items())) if found else None


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
