"""What the benchmarks show is what they measured: tables, figure and page, drawn from the JSON."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"
ROWS = [
    {"part": "sizes", "batch_size": 64, "samples": 128, "peak_bytes": 3 * 2**20},
    {"part": "sizes", "batch_size": 128, "samples": 128, "peak_bytes": 5 * 2**20},
    {"part": "counts", "batch_size": 64, "batches": 1, "peak_bytes": 2**20, "retained_bytes": 0},
    {"part": "counts", "batch_size": 64, "batches": 4, "peak_bytes": 2**20},
]
ROWS = [
    {"library": "<ours>", "retained_bytes": 3 * 2**20, "batches": 2, "device": "a & b"}
    | {"threads": 1, "torch": "2", "meter": "m"}
    | row
    for row in ROWS
] + [{"part": "counts", "library": "other", "skipped": "failed: no such call"}]


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts import each other, as they do when they are run."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


@pytest.mark.usefixtures("benchmarks")
def test_tables_in_docs_are_those_of_the_committed_results() -> None:
    """Drawing them again changes nothing."""
    import draw_tables

    texts = {page: page.read_text("utf-8") for page in draw_tables.TABLES}
    assert {page: draw_tables.drawn(page, text) for page, text in texts.items()} == texts
    assert any(draw_tables.libraries() in text for text in texts.values())


@pytest.mark.usefixtures("benchmarks")
def test_page_without_a_place_for_its_table_is_an_error() -> None:
    """Otherwise the table would silently go out of date."""
    import draw_tables

    page = draw_tables.DOCS / "explanation" / "figures.md"
    with pytest.raises(ValueError, match="no place for the table 'gates'"):
        draw_tables.drawn(page, "# no tables here")


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize(
    ("version", "library", "kind", "percent"),
    [
        ("2.9.0", "pytorch-cka 0.1.3", "peak", 0.09),
        ("2.9.0", "torch-cka 0.21", "peak", 0.29),
        ("2.9.0", "torch-cka 0.21", "retained", 0.31),
        ("2.15.0", "pytorch-cka 0.1.3", "peak", 0.72),
        ("2.15.0", "torch-cka 0.21", "peak", 3.78),
        ("2.15.0", "torch-cka 0.21", "retained", 1.40),
    ],
)
def test_emulated_figures_are_as_close_to_those_of_a_real_card_as_the_pages_say(
    version: str, library: str, kind: str, percent: float
) -> None:
    """The committed figures; every library and batch size of the notebook is among them."""
    from side_by_side_published import PUBLISHED

    (file,) = (BENCHMARKS / "results").glob(f"notebook-*-torch-{version}.json")
    rows = [row for row in json.loads(file.read_text("utf-8")) if row["library"] == library]
    published = {size: getattr(both, kind) for size, both in PUBLISHED[library].items()}
    found = {row["batch_size"]: row[f"{kind}_bytes"] / 2**20 for row in rows}
    errors = {size: 100 * (found[size] / published[size] - 1) for size in published}
    assert round(max(map(abs, errors.values())), 2) == percent


@pytest.mark.usefixtures("benchmarks")
def test_every_view_shows_what_was_measured() -> None:
    """Growth is that of retention from the first to the last number of batches."""
    import side_by_side_views as views

    text = views.text(ROWS)
    assert (
        "<ours>: peaks 3.00, 5.00 MB; retains 3.00 MB on average; retention grows by 1.00" in text
    )
    assert "other: no figure, failed: no such call" in text
    assert "time" not in text
    page = views.page(ROWS)
    assert "&lt;ours&gt;: peaks 3.00" in page
    assert "<ours>:" not in page
    assert page.count("<svg") == 1
    timeline, peak, retained = views.figure(ROWS).axes
    assert timeline.lines[0].get_ydata().tolist() == [0, 3]
    assert [bar.get_height() for bar in peak.patches] == [3, 5]
    assert [bar.get_height() for bar in retained.patches] == [3, 3]


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize(
    "file", sorted((BENCHMARKS / "results").glob("side-by-side-*.json")), ids=lambda path: path.stem
)
def test_the_committed_text_is_drawn_from_the_committed_figures(file: Path) -> None:
    """It was printed by the script, never typed in."""
    import side_by_side_views as views

    rows = json.loads(file.read_text("utf-8"))
    assert file.with_suffix(".txt").read_text("utf-8") == views.text(rows) + "\n"
