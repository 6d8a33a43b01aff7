"""What the columns of tables mean, and how figures that were not measured are labelled."""

from collections.abc import Mapping
from typing import Any

from pytest_cka_memory.core.figures import COLUMNS

LEGEND = (
    "Sizes are in MB (2**20 bytes) unless a unit is given. "
    + "; ".join(f"{figure.column}: {figure.legend}" for figure in COLUMNS if figure.legend)
    + "."
)
PREDICTED = "These figures are predicted for the device; they were not measured on it."


def is_predicted(session: Mapping[str, Any]) -> bool:
    """Whether the figures were computed for a device instead of measured on one."""
    return "predicted" in str(session.get("meter")).lower()
