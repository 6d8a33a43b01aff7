"""Write a table of all planted leaks, and what a report says about each: its line and its holder.

    python benchmarks/holders_table.py --json holders.json --markdown holders.md

The cases are those of ``tests/holders``: planted leaks, states that are computed from themselves,
and ways to make a tensor. Each runs in this process, on the CPU.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "holders")]

from conditions import conditions  # noqa: E402

_MOST_CHARACTERS = 160


class Row(NamedTuple):
    """What a report says about the largest group of a case."""

    table: str
    name: str
    bytes: int
    made_at: str
    held_by: str
    advice: str


class ExplainsGrowth:
    """Asks for what grows."""

    draws_paths = False

    def figures_to_explain(self, record: Any) -> Collection[str]:
        """Return the figure of growth."""
        return ("growth_bytes_per_batch",)

    def named_values(self) -> Mapping[str, Any]:
        """Return no names."""
        return {}


def main() -> None:
    """Run every case and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [*planted_leaks(), *states(), *makers()]
    counts = {
        "cases": len(rows),
        "named": sum(row.held_by != "" for row in rows),
        "owner in words": sum(row.held_by == "" and row.advice != "" for row in rows),
        "line": sum(row.made_at != "" for row in rows),
        "nothing": sum(row.held_by == "" and row.advice == "" for row in rows),
    }
    found = {"counts": counts, "rows": [row._asdict() for row in rows]}
    args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if args.markdown is not None:
        args.markdown.write_text("\n".join(lines(rows)) + "\n", "utf-8")
    print(counts)


def planted_leaks() -> Iterator[Row]:
    """Yield a row for each planted leak."""
    import pytest
    from leaks_in_caches import CACHES
    from leaks_in_graphs import GRAPHS
    from leaks_in_objects import OBJECTS
    from leaks_in_programs import PROGRAMS
    from leaks_in_torch import TORCH
    from planted import cleaned_up

    tables = {
        "object": OBJECTS,
        "program": PROGRAMS,
        "torch": TORCH,
        "graph": GRAPHS,
        "cache": CACHES,
    }
    for table, leaks in tables.items():
        for leak in leaks:
            with cleaned_up():
                try:
                    yield retained(table, leak.name, leak.plant)
                except pytest.skip.Exception:  # this torch version has no such leak
                    continue


def states() -> Iterator[Row]:
    """Yield a row for each state that is computed from itself."""
    from rebuilt_states import STATES

    from pytest_cka_memory import MemoryProbe

    for state in STATES:
        with MemoryProbe("cpu", explainer=ExplainsGrowth()).measure() as region:
            state.loop(region.batch_done)
        yield row_of("state", state.loop.__name__, region.record.grown)


def makers() -> Iterator[Row]:
    """Yield a row for each way to make a tensor."""
    from makers import MAKERS, NET
    from planted import KEEP, cleaned_up

    for maker in MAKERS:
        with TemporaryDirectory() as folder, cleaned_up():
            make = maker.make

            def keep(make: Any = make, folder: str = folder) -> None:
                KEEP.append(make(Path(folder)))

            try:
                yield retained("maker", make.__name__, keep)
            except ImportError:  # safetensors is not installed
                continue
        NET.zero_grad()


def retained(table: str, name: str, plant: Callable[[], None]) -> Row:
    """Return a row for what a function retains."""
    from pytest_cka_memory import MemoryProbe

    with MemoryProbe("cpu").measure() as region:
        plant()
    return row_of(table, name, region.retained)


def row_of(table: str, name: str, holdings: Any) -> Row:
    """Return a row for the first of some groups."""
    if not holdings:
        return Row(table, name, 0, "", "", "")
    first = holdings[0]
    return Row(table, name, first.bytes, first.made_at, first.held_by or "", first.hint or "")


def lines(rows: Collection[Row]) -> Iterator[str]:
    """Yield the lines of a page."""
    yield "# What a report says about each planted leak"
    yield ""
    found = {key: value for key, value in conditions().items() if isinstance(value, str)}
    yield ", ".join(f"{key} {value}" for key, value in found.items()) + ". "
    yield ""
    yield "| table | case | bytes | made at | held by | what to do |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        cells = (cell(text) for text in (row.made_at, row.held_by, row.advice))
        yield f"| {row.table} | {row.name} | {row.bytes:,} | {' | '.join(cells)} |"


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    text = " ".join(text.replace("|", "\\|").replace("`", "'").split())
    short = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    return f"`{short}`" if short else ""


if __name__ == "__main__":
    main()
