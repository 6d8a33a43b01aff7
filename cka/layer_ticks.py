"""Ticks of an axis with one layer at each integer.

A module of its own, because it imports matplotlib: :mod:`cka.plots` imports it when it draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from matplotlib.axis import Axis, XAxis
from matplotlib.ticker import FuncFormatter, Locator

LINE_HEIGHT = 1.25
"""Distance of two labels that do not touch, relative to the size of their font."""


class LayerLocator(Locator):
    """Labels every layer, or every second, third, … if the labels would overlap.

    The step depends on the size of the axes when they are drawn, and on the visible part.
    """

    def __init__(self, count: int, font_size: float) -> None:
        """Set the number of layers, and the size of the labels' font in points."""
        self._count = count
        self._font_size = font_size

    def __call__(self) -> list[int]:
        """Return the positions of the labelled layers."""
        axis = self.axis
        assert isinstance(axis, Axis)
        low, high = sorted(axis.get_view_interval())
        box = axis.axes.bbox
        length = box.width if isinstance(axis, XAxis) else box.height
        figure = axis.get_figure(root=True)
        assert figure is not None
        pixels_of_label = LINE_HEIGHT * self._font_size * figure.dpi / 72
        step = max(1, ceil(pixels_of_label * (high - low) / max(1.0, length)))
        return [at for at in range(0, self._count, step) if low <= at <= high]

    def tick_values(self, vmin: float, vmax: float) -> list[int]:
        """Return the same positions; matplotlib requires this method."""
        return self()


def label_layers(axis: Axis, names: Sequence[str], font_size: float) -> None:
    """Put the names of layers 0, 1, 2, … on an axis; those of a horizontal axis are upright.

    Args:
        axis: an axis on which each integer is a layer.
        names: the names of the layers.
        font_size: size of their font in points.
    """

    def name_at(position: float, _: object) -> str:
        number = round(position)
        return names[number] if 0 <= number < len(names) else ""

    axis.set_major_locator(LayerLocator(len(names), font_size))
    axis.set_major_formatter(FuncFormatter(name_at))
    rotation = 90 if isinstance(axis, XAxis) else 0
    axis.set_tick_params(labelsize=font_size, labelrotation=rotation)
