"""Tables and figures of the original notebook, drawn from measured rows."""

import html
import io
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from processes import Row
from tabulate import tabulate

from pytest_cka_memory.reports.files import write_whole
from pytest_cka_memory.units import MB

# Okabe and Ito's colours, which colour-blind people can distinguish.
COLOURS = ("#009e73", "#e69f00", "#d55e00", "#56b4e9", "#cc79a7", "#0072b2")


def libraries(rows: Sequence[Row]) -> list[str]:
    """Return the names of the libraries with at least one figure, in order of measurement."""
    return list(dict.fromkeys(row["library"] for row in rows if "skipped" not in row))


def sizes_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return a row per batch size: peak including the model, retained, and time if it was taken."""
    shown = [("peak, MB", "peak_bytes", 2), ("retained, MB", "retained_bytes", 2)]
    if any("time_ratio" in row for row in rows):
        shown.append(("time, × forward", "time_ratio", 2))
    return [
        {"batch size": str(size)}
        | {
            f"{name}: {title}": _cell(found.get(name), figure_name, digits)
            for name in libraries(rows)
            for title, figure_name, digits in shown
        }
        for size, found in _by(rows, "sizes", "batch_size").items()
    ]


def counts_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return a row per number of batches: what each library retains after them."""
    return [
        {"batches": str(count)}
        | {
            f"{name}: retained, MB": _cell(found.get(name), "retained_bytes", 2)
            for name in libraries(rows)
        }
        for count, found in _by(rows, "counts", "batches").items()
    ]


def summary(rows: Sequence[Row]) -> list[str]:
    """Return growth, retention and peak of each library, and which could not be measured."""
    lines = [f"{name}: {_in_a_line(rows, name)}" for name in libraries(rows)]
    skipped = dict.fromkeys(
        f"{row['library']}: no figure, {row['skipped']}" for row in rows if "skipped" in row
    )
    return [*lines, *skipped]


def conditions(rows: Sequence[Row]) -> str:
    """Return a line with what the figures depend on."""
    first = next((row for row in rows if "skipped" not in row), None)
    if first is None:
        return "nothing was measured"
    sizes = [row for row in rows if row["part"] == "sizes" and "skipped" not in row]
    samples = " or ".join(map(str, sorted({row["samples"] for row in sizes})))
    return (
        f"ResNet-18 for 32 x 32 images against itself, all layers, {samples} images; "
        f"{first['device']}, {first['threads']} threads, torch {first['torch']}; {first['meter']}"
    )


def _device(rows: Sequence[Row]) -> str:
    first = next((row for row in rows if "skipped" not in row), None)
    return "nothing was measured" if first is None else f"{first['device']}, torch {first['torch']}"


def text(rows: Sequence[Row]) -> str:
    """Return all tables and the summary for a terminal."""
    return "\n\n".join(
        [
            conditions(rows),
            *(_lay_out(table, "simple") for table in (sizes_table(rows), counts_table(rows))),
            "\n".join(summary(rows)),
        ]
    )


def figure(rows: Sequence[Row]) -> Figure:
    """Draw three panels: retained by number of batches, peak and retained by batch size."""
    drawn = Figure(figsize=(15, 4.8), layout="constrained")
    drawn.suptitle(_device(rows))
    timeline, peak, retained = drawn.subplots(1, 3)
    names = libraries(rows)
    sizes = list(_by(rows, "sizes", "batch_size"))
    for panel in (peak, retained):
        panel.set_xticks(range(len(sizes)), list(map(str, sizes)))
    for at, (name, colour) in enumerate(zip(names, cycle(COLOURS), strict=False)):
        points = _points(rows, "counts", name, "batches", "retained_bytes")
        timeline.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
        for panel, what in ((peak, "peak_bytes"), (retained, "retained_bytes")):
            points = _points(rows, "sizes", name, "batch_size", what)
            width = 0.8 / len(names)
            aside = (at - (len(names) - 1) / 2) * width
            where = [sizes.index(size) + aside for size, _ in points]
            panel.bar(where, [height for _, height in points], width, color=colour, label=name)
    for panel, title, below in (
        (timeline, "retained after so many batches of 64, MB", "batches"),
        (peak, "peak, model and all, MB", "batch size"),
        (retained, "retained after the comparison, MB", "batch size"),
    ):
        panel.set(title=title, xlabel=below)
        panel.grid(axis="y", alpha=0.3)
    timeline.legend()
    return drawn


def page(rows: Sequence[Row]) -> str:
    """Return one self-contained HTML page."""
    svg = io.StringIO()
    figure(rows).savefig(svg, format="svg")
    drawing = svg.getvalue()
    parts = "".join(f"<li>{html.escape(line)}</li>" for line in summary(rows))
    tables = "".join(_lay_out(table, "html") for table in (sizes_table(rows), counts_table(rows)))
    return _PAGE.format(
        conditions=html.escape(conditions(rows)),
        tables=tables,
        figure=drawing[drawing.index("<svg") :],
        summary=parts,
    )


def save(rows: Sequence[Row], stem: Path) -> None:
    """Write ``.txt``, ``.svg``, ``.png`` and ``.html`` files with the same stem."""
    write_whole(stem.with_name(stem.name + ".txt"), text(rows) + "\n")
    write_whole(stem.with_name(stem.name + ".html"), page(rows))
    for kind in ("svg", "png"):
        figure(rows).savefig(stem.with_name(f"{stem.name}.{kind}"), dpi=100)


def _by(rows: Sequence[Row], part: str, key: str) -> dict[int, dict[str, Row]]:
    found: dict[int, dict[str, Row]] = {}
    for row in rows:
        if row["part"] == part and "skipped" not in row:
            found.setdefault(row[key], {})[row["library"]] = row
    return dict(sorted(found.items()))


def _points(
    rows: Sequence[Row], part: str, name: str, key: str, figure_name: str
) -> list[tuple[int, float]]:
    found = _by(rows, part, key)
    return [(at, row[name][figure_name] / MB) for at, row in found.items() if name in row]


def _cell(row: Row | None, figure_name: str, digits: int) -> str:
    value = None if row is None else row.get(figure_name)
    if value is None:
        return "-"
    return f"{value / MB if figure_name.endswith('_bytes') else value:.{digits}f}"


def _lay_out(table: Sequence[dict[str, Any]], kind: str) -> str:
    return tabulate(table, headers="keys", tablefmt=kind, disable_numparse=True, stralign="right")


def _in_a_line(rows: Sequence[Row], name: str) -> str:
    sizes, counts = (
        [found[name] for found in _by(rows, part, key).values() if name in found]
        for part, key in (("sizes", "batch_size"), ("counts", "batches"))
    )
    parts = []
    if sizes:
        peaks = ", ".join(f"{row['peak_bytes'] / MB:.2f}" for row in sizes)
        kept = sum(row["retained_bytes"] for row in sizes) / len(sizes) / MB
        parts += [f"peaks {peaks} MB", f"retains {kept:.2f} MB on average"]
    if len(counts) > 1:
        first, last = counts[0], counts[-1]
        rise = (last["retained_bytes"] - first["retained_bytes"]) / MB
        rate = rise / (last["batches"] - first["batches"])
        parts.append(f"retention grows by {rate:.2f} MB a batch")
    return "; ".join(parts)


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>CKA libraries side by side</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
          padding: 0 1rem; }}
  table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }}
  th, td {{ padding: .25rem .75rem; border-bottom: 1px solid #8886; font-weight: normal; }}
  svg {{ width: 100%; height: auto; background: white; }}
</style>
<h1>CKA libraries side by side</h1>
<p>{conditions}</p>
{figure}
{tables}
<ul>{summary}</ul>
"""
