"""What the columns of tables mean, and how figures that were not measured are labelled."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pytest_cka_memory.core.figure import Figure


def legend_of(columns: Iterable[Figure]) -> str:
    """Return the unit and the meaning of the columns of a table."""
    unit = "Sizes are in MB (2**20 bytes) unless a unit is given."
    meanings = [f"{row.column}: {row.legend}" for row in columns if row.legend]
    return f"{unit} {'; '.join(meanings)}." if meanings else unit


class Provenance(NamedTuple):
    """Where figures come from that were not measured on the device that they are for."""

    adjective: str
    """``predicted`` or ``emulated``."""
    notice: str
    """One sentence for the top of a report."""
    verb: str
    """How a failure message leads to the device."""


MEASURED = Provenance("", "", "measured on")
_NOT_MEASURED = (
    Provenance(  # only in reports of earlier versions, which had predict:cuda
        "predicted",
        "These figures are predicted for the device; they were not measured on it.",
        "predicted for",
    ),
    Provenance(
        "emulated",
        "These figures come from torch's CUDA allocator on an emulated device; no GPU was used.",
        "emulated as",
    ),
)


def provenance_of(session: Mapping[str, Any]) -> Provenance:
    """Return where the figures of a session come from."""
    meter = str(session.get("meter")).lower()
    return next((source for source in _NOT_MEASURED if source.adjective in meter), MEASURED)


def heading(provenance: Provenance) -> str:
    """Return the heading of a report: ``Memory``, ``Predicted memory`` or ``Emulated memory``."""
    return f"{provenance.adjective} memory".strip().capitalize()
