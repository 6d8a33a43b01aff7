"""Plots: every label can be read, results share one colour scale, and files are written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cka import Calibration, CKAResult, CKAResults, InputError

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def close_figures():
    """Close all figures after each test."""
    yield
    plt.close("all")


def made_up(rows, columns, seed=0, name="theirs", low=-0.1):
    """Return a result with random values and long names of layers."""
    generator = torch.Generator().manual_seed(seed)
    matrix = low + (0.9 - low) * torch.rand(rows, columns, generator=generator)
    names = [f"encoder.layers.{at // 8}.attention.{at % 8}" for at in range(max(rows, columns))]
    return CKAResult(
        matrix, torch.full_like(matrix, 0.05), names[:rows], names[:columns], "ours", name, 64, 2,
        "unbiased", "linear", False,
    )  # fmt: skip


def assert_readable(axis):
    """Check that no labels overlap, and that all are inside the figure. Returns their texts.

    The figure must have been drawn.
    """
    figure = axis.get_figure(root=True)
    drawn = [label for label in axis.get_ticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in drawn]
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    return [label.get_text() for label in drawn]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(3, 2), (66, 150)])
def test_every_layer_is_labelled_and_no_labels_overlap(rows, columns):
    """A new figure is large enough that every layer has a label and none overlap, also with 150."""
    result = made_up(rows, columns)
    axes = result.plot()
    axes.figure.canvas.draw()
    assert assert_readable(axes.yaxis) == result.model1_layers
    assert assert_readable(axes.xaxis) == result.model2_layers
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("ours", "theirs")


@pytest.mark.slow
def test_many_layers_are_drawn_once_with_every_second_name(tmp_path):
    """The place of a large heat map is computed, so that no layout draws all labels once more."""
    axes = made_up(300, 120).plot()
    figure = axes.get_figure(root=True)
    assert figure.get_layout_engine() is None
    axes.yaxis.get_major_formatter().func = lambda at, _: f"layers.{at:.0f}"
    figure.canvas.draw()
    assert assert_readable(axes.yaxis) == [f"layers.{at}" for at in range(0, 300, 2)]
    assert len(assert_readable(axes.xaxis)) == 120
    for text in (axes.title, axes.yaxis.label, axes.xaxis.label, figure.axes[1].yaxis.label):
        box = text.get_window_extent()
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    made_up(300, 300).plot(save_path=tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 100_000


def calibrated(result, p_best):
    """Return a result with these p-values."""
    like = torch.zeros_like(p_best)
    return replace(result, calibration=Calibration(like, like, like, p_best, p_best, 200))


def strokes_of(axes):
    """Return the cells (row, column) with a stroke."""
    _, found = axes.collections  # the cells, and the strokes
    middles = [path.vertices.mean(0) for path in found.get_paths()]
    return [(round(y), round(x)) for x, y in middles]


def test_cells_that_are_not_significant_have_a_stroke():
    """Strokes are in the cells whose p_best is above the level; NaN has none."""
    p_best = torch.tensor([[0.01, 0.2], [0.05, torch.nan], [0.06, 0.04]], dtype=torch.float64)
    result = calibrated(made_up(3, 2), p_best)
    assert strokes_of(result.plot()) == [(0, 1), (2, 0)]
    assert strokes_of(result.plot(level=0.01)) == [(0, 1), (1, 0), (2, 0), (2, 1)]
    several = CKAResults({"one": result, "other": made_up(3, 2)}).plot()
    assert strokes_of(several.axes[0]) == [(0, 1), (2, 0)]
    assert len(several.axes[1].collections) == 1


def test_strokes_are_seen_on_dark_and_on_light_cells():
    """A stroke is white on a dark cell and black on a light one."""
    result = made_up(1, 2)
    result = replace(result, matrix=torch.tensor([[0.0, 1.0]]))
    axes = calibrated(result, torch.ones(1, 2, dtype=torch.float64)).plot()
    _, found = axes.collections
    assert [colour[:3].sum() for colour in found.get_colors()] == [3, 0]


@pytest.mark.slow
def test_small_axes_label_some_of_the_layers():
    """On small axes some layers are labelled, and more of them if a part of the matrix is shown."""
    result = made_up(150, 20)
    figure, axes = plt.subplots(figsize=(3, 8), layout="constrained")
    result.plot(ax=axes)
    figure.canvas.draw()
    shown = assert_readable(axes.yaxis)
    assert 20 < len(shown) < 80
    assert set(assert_readable(axes.xaxis)) < set(result.model2_layers)
    axes.set_ylim(9.5, 29.5)
    figure.canvas.draw()
    assert assert_readable(axes.yaxis) == result.model1_layers[10:30]


@pytest.mark.slow
def test_results_side_by_side_have_one_colour_scale():
    """Results side by side share one colour bar, from the lowest value of all to 1."""
    results = CKAResults(
        {
            "epoch 1": made_up(12, 9, name="epoch 1", low=0.2),
            ("a", "b"): made_up(12, 5, seed=1, low=-0.3),
            "epoch 9": made_up(12, 70, seed=2),
        }
    )
    figure = results.plot()
    figure.canvas.draw()
    *panels, bar = figure.axes
    assert [panel.get_title() for panel in panels] == ["epoch 1", "a and b", "epoch 9"]
    lowest = min(float(result.matrix.min()) for result in results.values())
    assert {panel.collections[0].get_clim() for panel in panels} == {(lowest, 1.0)}
    assert bar.get_ylabel() == "CKA"
    for panel, result in zip(panels, results.values(), strict=True):
        assert torch.equal(torch.tensor(panel.collections[0].get_array()).float(), result.matrix)
        assert assert_readable(panel.xaxis)
        # The rows are the same layers, so only the first panel names them.
        assert bool(assert_readable(panel.yaxis)) == (panel is panels[0])


@pytest.mark.slow
def test_panels_with_different_rows_are_all_labelled():
    """Five results are in two rows of panels, which are all labelled."""
    results = {f"epoch {number}": made_up(4 + number % 2, 3, seed=number) for number in range(5)}
    figure = CKAResults(results).plot()
    figure.canvas.draw()
    panels = figure.axes[:-1]
    assert len(panels) == 5
    for panel, result in zip(panels, results.values(), strict=True):
        assert assert_readable(panel.yaxis) == result.model1_layers


def test_difference_of_two_results_has_zero_in_the_middle():
    """A difference plot shows the first result minus the second one, with zero in the middle."""
    one, other = made_up(6, 4, seed=0, name="epoch 1"), made_up(6, 4, seed=1, name="epoch 9")
    axes = one.plot_difference(other)
    shown = torch.tensor(axes.collections[0].get_array())
    assert torch.equal(shown, one.matrix.double() - other.matrix.double())
    low, high = axes.collections[0].get_clim()
    assert -low == high == float(shown.abs().max())
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("ours", "epoch 1, epoch 9")
    assert axes.get_title() == "CKA: (ours and epoch 1) − (ours and epoch 9)"
    assert one.plot_difference(one).collections[0].get_clim() == (-1e-6, 1e-6)


def test_difference_of_different_layers_is_an_error():
    """The error for a difference of different layers has their numbers, and examples."""
    with pytest.raises(InputError, match=r"\(6 and 7, e\.g\. encoder\.layers\.0\.attention\.6\);"):
        made_up(6, 4).plot_difference(made_up(7, 4))
    turned = made_up(6, 4)
    turned.model2_layers.reverse()
    with pytest.raises(InputError, match="4 and 4, in another order"):
        made_up(6, 4).plot_difference(turned)


@pytest.mark.slow
def test_best_matches_are_a_line_with_the_names_of_layers_and_matches():
    """Best matches are drawn with rows below and matches above; a row of NaN has no point."""
    result = made_up(66, 70)
    result.matrix[3] = torch.nan
    axes = result.plot_best_matches()
    axes.figure.canvas.draw()
    (line,) = axes.lines
    matches = result.best_matches()
    assert list(line.get_ydata()) == [match.value for match in matches]
    assert list(line.get_xdata()) == [at for at in range(66) if at != 3]
    assert assert_readable(axes.xaxis) == result.model1_layers
    (upper,) = axes.child_axes
    assert assert_readable(upper.xaxis) == [match.match for match in matches]
    assert (axes.get_xlabel(), upper.get_xlabel()) == ("ours", "best match in theirs")


def test_best_matches_of_several_results_are_lines_with_their_names():
    """The best matches of several results with the same rows are one line for each."""
    results = {f"epoch {number}": made_up(8, 5, seed=number) for number in range(3)}
    axes = CKAResults(results).plot_best_matches()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(results)
    for line, result in zip(axes.lines, results.values(), strict=True):
        assert list(line.get_ydata()) == [match.value for match in result.best_matches()]
    with pytest.raises(InputError, match="have different rows; plot only results"):
        CKAResults({"a": made_up(8, 5), "b": made_up(7, 5)}).plot_best_matches()


def test_no_results_are_an_error():
    """To plot no results is an error, because there is nothing to draw."""
    for plot in (CKAResults({}).plot, CKAResults({}).plot_best_matches):
        with pytest.raises(InputError, match="no results to plot; pass at least one"):
            plot()


@pytest.mark.slow
def test_save_path_writes_a_file_and_leaves_no_open_figure(tmp_path):
    """A figure that is shown stays open until it is closed; one that is saved does not."""
    one = made_up(3, 4)
    one.plot(save_path=tmp_path / "map.png")
    one.plot_difference(made_up(3, 4, seed=1), save_path=str(tmp_path / "difference.svg"))
    one.plot_best_matches(save_path=tmp_path / "matches.pdf")
    CKAResults({"a": one, "b": one}).plot(save_path=tmp_path / "several.png")
    starts = {path.name: path.read_bytes()[:5] for path in tmp_path.iterdir()}
    assert starts == {
        "map.png": b"\x89PNG\r", "difference.svg": b"<?xml", "matches.pdf": b"%PDF-",
        "several.png": b"\x89PNG\r",
    }  # fmt: skip
    assert plt.get_fignums() == []
    one.plot()
    assert len(plt.get_fignums()) == 1


@pytest.mark.slow
def test_heat_map_computes_a_colour_for_each_cell_and_not_for_each_pixel(tmp_path):
    """A file of 300 layers has 9 million pixels, but 90,000 cells; colours are those of cells."""
    result = made_up(300, 300)
    axes = result.plot(save_path=tmp_path / "large.png")
    (mesh,) = axes.collections
    assert mesh.get_facecolor().shape == (300 * 300, 4)
    assert not axes.images
    image = plt.imread(tmp_path / "large.png")
    assert 2500 < max(image.shape) <= 3600
