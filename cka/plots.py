"""Heat maps of results, drawn with matplotlib if it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cka.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

_MAX_LABELS = 80


def missing_extra(package: str, needed_for: str) -> MissingExtraError:
    """Return the error for an optional package that is not installed."""
    return MissingExtraError(
        f"{needed_for} needs {package}, which is not installed; "
        'install it with: pip install "pytest-cka-memory[plot]"'
    )


def heat_map(
    matrix: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    row_model: str,
    column_model: str,
    ax: Axes | None = None,
    cmap: str = "magma",
) -> Axes:
    """Draw (L1, L2) values with the first layers in the lower left corner, as the papers do.

    The vertical axis shows the rows and the horizontal axis the columns. NaN is left blank.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise missing_extra("matplotlib", "plot()") from error
    if ax is None:
        side = min(24.0, 4.0 + 0.17 * max(len(rows), len(columns)))
        _, ax = plt.subplots(figsize=(side + 1, side), layout="constrained")
    values = matrix.double().numpy()
    # Unbiased estimates may be negative, so the colour scale starts at the lowest one.
    low = min(0.0, float(matrix.nan_to_num(0).min()))
    image = ax.imshow(values, origin="lower", cmap=cmap, vmin=low, vmax=1.0, aspect="auto")
    _label_ticks(ax.xaxis, columns, rotation=90)
    _label_ticks(ax.yaxis, rows, rotation=0)
    ax.set_xlabel(column_model)
    ax.set_ylabel(row_model)
    ax.set_title(f"CKA: {row_model} and {column_model}")
    ax.figure.colorbar(image, ax=ax, label="CKA")
    return ax


def _label_ticks(axis: Any, names: Sequence[str], rotation: int) -> None:
    """Label every layer, or every second, third, … if there are more than ``_MAX_LABELS``."""
    step = -(-len(names) // _MAX_LABELS)
    shown = range(0, len(names), step)
    size = 9 if len(names) <= 30 else 7 if len(names) <= 50 else 6
    axis.set_ticks(list(shown), [names[at] for at in shown], rotation=rotation, fontsize=size)
