"""Plots of results, drawn with matplotlib if it is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from cka.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cka.functional.distributions import Calibration

SavePath = str | os.PathLike[str]

# Sizes are in inches unless noted.
_LABEL_PITCH = 1.4  # space for each label, relative to its font
_CHARACTER = 0.58  # mean width of a character, relative to its font
_MARGIN = 0.9  # for title, names of models and colour bar
_MIN_SIDE = 3.0
_MAX_SIDE_OF_PANEL = 8.0
_PANELS_PER_ROW = 4
_WIDTH_OF_BAR = 0.25
_DOTS_PER_INCH = 150
_MOST_DOTS = 3000
# In a PDF or SVG, more cells than these are a picture.
_MOST_CELLS_AS_SHAPES = 10_000
_MOST_LAYERS_FOR_LAYOUT = 100
# Of more layers, every second, third, ... is named: each name takes a millisecond or two.
_MOST_NAMES = 150


class Drawable(Protocol):
    """The part of a CKAResult that is drawn."""

    @property
    def matrix(self) -> Tensor:
        """CKA, (L1, L2)."""

    @property
    def title(self) -> str:
        """Name of the measure."""

    @property
    def model1_layers(self) -> list[str]:
        """Labels of the L1 rows."""

    @property
    def model2_layers(self) -> list[str]:
        """Labels of the L2 columns."""

    @property
    def calibration(self) -> Calibration | None:
        """p-values of the pairs, or None."""

    @property
    def model1_name(self) -> str:
        """Name of the rows' model."""

    @property
    def model2_name(self) -> str:
        """Name of the columns' model."""

    def best_matches(self) -> Sequence[Any]:
        """Return the best match of each row."""


def missing_extra(package: str, needed_for: str) -> MissingExtraError:
    """Return the error for an optional package that is not installed.

    Args:
        package: name of the package.
        needed_for: what needs it, as a user writes it.
    """
    return MissingExtraError(
        f"{needed_for} needs {package}, which is not installed; run pip install "
        "'pytest-cka-memory[plot]'"
    )


def heat_map(
    result: Drawable, *, ax: Axes | None, cmap: str, level: float, save_path: SavePath | None
) -> Axes:
    """Draw (L1, L2) values with the first layers in the lower left corner, as the papers do.

    The vertical axis shows the rows and the horizontal axis the columns. NaN is left blank. Cells
    with a stroke have a ``p_best`` above ``level``.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    ax = ax or _new_axes_of(result, save_path)
    _draw_matrix(ax, result, result.matrix, _colours([result]), cmap)
    title = f"{result.title}: {result.model1_name} and {result.model2_name}"
    ax.set_title(title, size=1.2 * _size_of_names(ax), y=1.0)  # else it measures all labels
    _mark_by_chance(ax, result, level)
    label = result.title + ("" if result.calibration is None else f" (╱ : p_best > {level:g})")
    _add_colour_bar(ax.get_figure(root=True), [ax], label)
    _save(ax.get_figure(root=True), save_path)
    return ax


def difference_map(
    result: Drawable, other: Drawable, *, ax: Axes | None, cmap: str, save_path: SavePath | None
) -> Axes:
    """Draw the matrix of ``result`` minus that of ``other``; zero is the middle of the colours.

    Raises:
        InputError: if the results have different layers.
        MissingExtraError: if matplotlib is not installed.
    """
    for layers, other_layers in (
        (result.model1_layers, other.model1_layers),
        (result.model2_layers, other.model2_layers),
    ):
        if layers != other_layers:
            differing = sorted(set(layers) ^ set(other_layers))[:3]
            raise InputError(
                f"the results have different layers ({len(layers)} and {len(other_layers)}"
                f"{', e.g. ' if differing else ', in another order'}{', '.join(differing)}); "
                "compare the same layers in both, with model1_layers= and model2_layers="
            )
    ax = ax or _new_axes_of(result, save_path)
    difference = result.matrix.double() - other.matrix.double()
    # Not 0 for equal results, which would be an empty range of colours.
    limit = max(float(difference.nan_to_num(0).abs().max()), 1e-6)
    _draw_matrix(ax, result, difference, (-limit, limit), cmap)
    ax.set_ylabel(_common_name(result.model1_name, other.model1_name), size=_size_of_names(ax))
    ax.set_xlabel(_common_name(result.model2_name, other.model2_name), size=_size_of_names(ax))
    pairs = [f"{each.model1_name} and {each.model2_name}" for each in (result, other)]
    ax.set_title(f"{result.title}: ({pairs[0]}) − ({pairs[1]})", size=1.2 * _size_of_names(ax))
    _add_colour_bar(ax.get_figure(root=True), [ax], f"difference of {result.title}")
    _save(ax.get_figure(root=True), save_path)
    return ax


def _common_name(name: str, other_name: str) -> str:
    return name if name == other_name else f"{name}, {other_name}"


def heat_maps(
    results: Mapping[str, Drawable], *, cmap: str, level: float, save_path: SavePath | None
) -> Figure:
    """Draw several results by title, side by side and with one colour scale.

    Cells with a stroke have a ``p_best`` above ``level``.

    Raises:
        InputError: if there are no results.
        MissingExtraError: if matplotlib is not installed.
    """
    if not results:
        raise InputError("there are no results to plot; pass at least one")
    columns = min(_PANELS_PER_ROW, len(results))
    rows = -(-len(results) // columns)
    sizes = [_size(result, _MAX_SIDE_OF_PANEL) for result in results.values()]
    width, height = (max(sides) for sides in zip(*sizes, strict=True))
    figure = _new_figure((columns * width, rows * height), save_path)
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    layers = [result.model1_layers for result in results.values()]
    label_once = all(names == layers[0] for names in layers)
    for unused in panels[len(results) :]:
        unused.remove()
    colours = _colours(list(results.values()))
    for panel, (title, result) in zip(panels, results.items(), strict=False):
        _draw_matrix(panel, result, result.matrix, colours, cmap)
        _mark_by_chance(panel, result, level)
        panel.set_title(title, size=1.2 * _size_of_names(panel))
        panel.tick_params(axis="y", labelleft=not label_once or panel in panels[::columns])
    calibrated = any(result.calibration is not None for result in results.values())
    label = next(iter(results.values())).title + (
        f" (╱ : p_best > {level:g})" if calibrated else ""
    )
    _add_colour_bar(figure, panels[: len(results)], label)
    _save(figure, save_path)
    return figure


def best_match_lines(
    results: Mapping[str, Drawable], *, ax: Axes | None, save_path: SavePath | None
) -> Axes:
    """Draw the highest CKA of each row as a line with its standard error, one line per result.

    The axis below has the rows. If there is one result, the axis above has the matches.

    Raises:
        InputError: if there are no results, or if their rows differ.
        MissingExtraError: if matplotlib is not installed.
    """
    if not results:
        raise InputError("there are no results to plot; pass at least one")
    layers = next(iter(results.values())).model1_layers
    if any(result.model1_layers != layers for result in results.values()):
        raise InputError(
            "the results have different rows; plot only results whose first model has the same "
            "layers, or plot one result at a time"
        )
    font = _font_size(len(layers))
    longest = max(
        len(name)
        for result in results.values()
        for name in (*result.model1_layers, *result.model2_layers)
    )
    label = longest * _CHARACTER * font / 72
    width = max(2 * _MIN_SIDE, len(layers) * _LABEL_PITCH * font / 72) + _MARGIN
    ax = ax or _new_axes((width, _MIN_SIDE + 2 * label + _MARGIN), save_path)
    for title, result in results.items():
        _draw_line(ax, result, title)
    from cka.layer_ticks import label_layers

    ax.set_xlim(-0.5, len(layers) - 0.5)
    label_layers(ax.xaxis, layers, font)
    ax.grid(axis="y", alpha=0.3)
    ax.set_ylabel(f"{next(iter(results.values())).title} of the best match")
    first = next(iter(results.values()))
    ax.set_xlabel(first.model1_name)
    if len(results) == 1:
        _label_matches(ax, first, font)
    else:
        ax.legend()
    _save(ax.get_figure(root=True), save_path)
    return ax


def _draw_line(ax: Axes, result: Drawable, title: str) -> None:
    position = {layer: at for at, layer in enumerate(result.model1_layers)}
    matches = result.best_matches()
    at = [position[match.layer] for match in matches]
    values = torch.tensor([match.value for match in matches], dtype=torch.float64)
    errors = torch.tensor([match.standard_error for match in matches], dtype=torch.float64)
    (line,) = ax.plot(at, values.numpy(), "o-", markersize=3, linewidth=1, label=title)
    errors = errors.nan_to_num(0)
    ax.fill_between(
        at,
        (values - errors).numpy(),
        (values + errors).numpy(),
        color=line.get_color(),
        alpha=0.2,
        linewidth=0,
    )


def _label_matches(ax: Axes, result: Drawable, font: float) -> None:
    """Write the best match of each row at the upper edge."""
    from cka.layer_ticks import label_layers

    matched = {match.layer: match.match for match in result.best_matches()}
    upper = ax.secondary_xaxis("top")
    label_layers(upper.xaxis, [matched.get(name, "") for name in result.model1_layers], font)
    upper.set_xlabel(f"best match in {result.model2_name}")


def _draw_matrix(
    ax: Axes, result: Drawable, values: Tensor, colours: tuple[float, float], cmap: str
) -> None:
    from cka.layer_ticks import label_layers

    low, high = colours
    rows, columns = values.shape
    # Not imshow, which computes a colour for each pixel: 10 s for the 42 million of 300 layers.
    mesh = ax.pcolormesh(
        torch.arange(columns + 1).numpy() - 0.5,
        torch.arange(rows + 1).numpy() - 0.5,
        values.double().numpy(),
        cmap=cmap,
        vmin=low,
        vmax=high,
    )
    mesh.set_rasterized(values.numel() > _MOST_CELLS_AS_SHAPES)
    font = _font_size(max(values.shape))
    label_layers(ax.xaxis, result.model2_layers, font)
    label_layers(ax.yaxis, result.model1_layers, font)
    if max(values.shape) > _MOST_LAYERS_FOR_LAYOUT:
        # Without tick marks: the names stand right beside their rows and columns, and a mark takes
        # as long to draw as a name.
        ax.tick_params(bottom=False, left=False)
    ax.set_xlabel(result.model2_name, size=_size_of_names(ax))
    ax.set_ylabel(result.model1_name, size=_size_of_names(ax))


def _mark_by_chance(ax: Axes, result: Drawable, level: float) -> None:
    """Draw a stroke through each cell that is not significant, if the result is calibrated."""
    if result.calibration is None:
        return
    from matplotlib.collections import LineCollection

    shades = ax.collections[0].to_rgba(result.matrix.double().numpy())[:, :, :3].sum(2)
    cells = (result.calibration.p_best > level).nonzero().tolist()  # False for NaN
    strokes = [[(column - 0.3, row - 0.3), (column + 0.3, row + 0.3)] for row, column in cells]
    # White on dark cells and black on light ones.
    colours = ["white" if shades[row, column] < 1.5 else "black" for row, column in cells]
    ax.add_collection(LineCollection(strokes, colors=colours, linewidths=0.8), autolim=False)


def _colours(results: Sequence[Drawable]) -> tuple[float, float]:
    # Unbiased estimates may be negative, so the colour scale starts at the lowest one.
    return min(0.0, *(float(result.matrix.nan_to_num(0).min()) for result in results)), 1.0


def _add_colour_bar(figure: Any, axes: Sequence[Axes], label: str) -> None:
    width, height = figure.get_size_inches()
    bar = figure.colorbar(
        axes[0].collections[0],
        ax=list(axes),
        fraction=min(0.15, 0.45 / width),  # of the width of the axes
        pad=0.01,
        aspect=max(20, height / _WIDTH_OF_BAR),
    )
    bar.set_label(label, size=_size_of_names(axes[0]))


def _size_of_names(ax: Axes) -> float:
    """Return the font size of titles and models' names, which is larger in a large figure."""
    side = min(ax.get_figure(root=True).get_size_inches())  # type: ignore[union-attr]
    return max(10.0, min(20.0, 1.1 * float(side)))


def _font_size(layers: int) -> float:
    return 9 if layers <= 30 else 8 if layers <= 80 else 7


def _size(result: Drawable, max_side: float = float("inf")) -> tuple[float, float]:
    """Return width and height of a heat map in which every label has enough space."""
    rows, columns = result.model1_layers, result.model2_layers
    font = _font_size(max(len(rows), len(columns))) / 72

    def side(count: int) -> float:
        return min(max_side, max(_MIN_SIDE, count * _LABEL_PITCH * font))

    def label(names: Sequence[str]) -> float:
        return max(map(len, names)) * _CHARACTER * font

    width = side(len(columns)) + label(rows) + _MARGIN
    return 1.04 * width + _MARGIN / 2, side(len(rows)) + label(columns) + _MARGIN


def _new_axes(size: tuple[float, float], save_path: SavePath | None) -> Axes:
    axes: Axes = _new_figure(size, save_path).subplots()
    return axes


def _new_axes_of(result: Drawable, save_path: SavePath | None) -> Axes:
    """Return axes for a heat map; those of many layers have a place that is computed here.

    The layout of matplotlib would draw all labels once more to see how large they are, which takes
    as long as the drawing itself. The longest ones are enough.
    """
    rows, columns = result.model1_layers, result.model2_layers
    if max(len(rows), len(columns)) <= _MOST_LAYERS_FOR_LAYOUT:
        return _new_axes(_size(result), save_path)
    font = _font_size(max(len(rows), len(columns)))
    left, below = (_longest(names, font) + 0.7 * _MARGIN for names in (rows, columns))
    width, height = (
        max(_MIN_SIDE, min(_MOST_NAMES, len(names)) * _LABEL_PITCH * font / 72)
        for names in (columns, rows)
    )
    bar = 0.45 + _WIDTH_OF_BAR + 0.02 * width
    whole = (left + width + bar + _MARGIN, below + height + _MARGIN)
    figure = _new_figure(whole, save_path, layout=None)
    place = (left / whole[0], below / whole[1], (width + bar) / whole[0], height / whole[1])
    axes: Axes = figure.add_axes(place)
    return axes


def _longest(names: Sequence[str], font: float) -> float:
    """Return the width of the widest name in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    properties = FontProperties(size=font)
    longest = sorted(set(names), key=len)[-3:]
    paths = (TextPath((0, 0), name or " ", size=font, prop=properties) for name in longest)
    return max(float(path.get_extents().width) for path in paths) / 72


def _new_figure(
    size: tuple[float, float],
    save_path: SavePath | None,
    layout: Literal["constrained"] | None = "constrained",
) -> Figure:
    """Return a figure; one that is saved is not shown, and pyplot does not keep it."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "plot()") from error
    new = plt.figure if save_path is None else Figure
    return new(figsize=size, layout=layout)


def _save(figure: Any, save_path: SavePath | None) -> None:
    if save_path is not None:
        side = max(figure.get_size_inches())
        # Labels have 7 points in a figure of any size, and so enough dots at half the resolution.
        dots = max(_DOTS_PER_INCH / 2, min(_DOTS_PER_INCH, _MOST_DOTS / side))
        # For the 8 million pixels of 300 layers, the usual compression takes a seventh of the time
        # of the whole plot; this one makes the file 8 % larger.
        is_png = os.fspath(save_path).lower().endswith(".png")
        options: dict[str, Any] = {"pil_kwargs": {"compress_level": 1}} if is_png else {}
        figure.savefig(save_path, dpi=dots, **options)
