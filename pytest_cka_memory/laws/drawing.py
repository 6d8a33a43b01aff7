"""Draw a law with matplotlib."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pytest_cka_memory.errors import MissingPackageError
from pytest_cka_memory.laws.fitting import Fitted
from pytest_cka_memory.units import MB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEPS = 200
_BEYOND = 2
"""How many times the largest size that was run is drawn."""


def plot(
    fitted: Fitted, figure: str, name: str, sizes: Mapping[str, int], ax: "Axes | None"
) -> "Axes":
    """Do what :meth:`~pytest_cka_memory.Law.plot` says."""
    if ax is None:
        try:
            from matplotlib import pyplot as plt
        except ImportError as error:
            raise MissingPackageError(
                "plot() needs matplotlib: pip install 'pytest-cka-memory[plot]'"
            ) from error
        ax = plt.subplots()[1]
    index = fitted.names.index(name)
    point = [sizes.get(each, low) for each, low in zip(fitted.names, fitted.least, strict=True)]
    most = _BEYOND * max(sample.point[index] for sample in fitted.samples)
    values = sorted({max(1, most * step // _STEPS) for step in range(_STEPS + 1)})
    points = [(*point[:index], value, *point[index + 1 :]) for value in values]
    for piece in dict.fromkeys(map(fitted.piece_at, points)):
        levels = [float(piece.polynomial.at(each)) / MB for each in points]
        ax.plot(values, levels, linewidth=1, linestyle=":", label=str(piece.polynomial))
    ax.plot(values, [fitted.value_at(each) / MB for each in points], color="black", label="law")
    rest = (*point[:index], *point[index + 1 :])
    measured = [
        sample
        for sample in fitted.samples
        if (*sample.point[:index], *sample.point[index + 1 :]) == rest
    ]
    ax.plot(
        [sample.point[index] for sample in measured],
        [sample.value / MB for sample in measured],
        "o",
        label="measured",
    )
    others = ", ".join(
        f"{each}={value:,}" for each, value in zip(fitted.names, point, strict=True) if each != name
    )
    ax.set_xlabel(name)
    ax.set_ylabel("MB")
    ax.set_title(f"{figure}{f' at {others}' if others else ''}")
    ax.legend(fontsize="small")
    return ax
