"""Draw the tables of the documentation from the committed results; prints what changed.

python benchmarks/draw_tables.py

A table lies between ``<!-- drawn: NAME -->`` and ``<!-- end -->``. A test checks that drawing the
tables again changes nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path

import card_tables
import cka_tables
import compiled_tables
import cost_tables
import foreign_tables
import law_tables
import ranks_tables
import real_cards_tables
import repairs_tables
import scripts_tables
import snapshot_tables
import values_tables
from processes import Row
from side_by_side_published import PUBLISHED
from versions_tables import skips, versions

from pytest_cka_memory.reports import terminal
from pytest_cka_memory.reports.files import write_whole
from pytest_cka_memory.stored.json_report import read
from pytest_cka_memory.units import MB

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
NOTEBOOK_VERSIONS = ("2.9.1", "2.15.0")
_COLUMNS = 100


def libraries() -> str:
    """Every library relative to the bare forward pass; how it failed, if it did.

    It has CPU time, which a busy machine allows.
    """
    head = ("network", "library", "batch", "peak, MB above start", "× bare forward")
    return _markdown(
        (*head, "retained, MB", "CPU time, × bare forward"),
        [
            (row["network"], row["library"], str(row["batch_size"]), *_beside_the_forward(row))
            for row in _results("libraries-*.json")
        ],
    )


def _beside_the_forward(row: Row) -> tuple[str, ...]:
    if "skipped" in row:
        return (row["skipped"], "-", "-", "-")
    return (
        f"{row['peak_increase_bytes'] / MB:.2f}",
        f"{row['peak_ratio']:.3f}",
        f"{row['retained_bytes'] / MB:.2f}",
        f"{row['cpu_time_ratio']:.2f}",
    )


def side_by_side() -> str:
    """The notebook's first table: peak, including the model, and retained, by batch size."""
    rows = [row for row in _results("side-by-side-*.json") if "skipped" not in row]
    names = list(dict.fromkeys(row["library"] for row in rows))
    sizes = sorted({row["batch_size"] for row in rows if row["part"] == "sizes"})
    found = {(row["library"], row["batch_size"]): row for row in rows if row["part"] == "sizes"}
    return _markdown(
        ("library", *(f"batch {size}: peak / retained, MB" for size in sizes)),
        [
            (name, *(_pair(found[name, size]) if (name, size) in found else "-" for size in sizes))
            for name in names
        ],
    )


def notebook() -> str:
    """The notebook's loop on the emulated device, and what the notebook published for a GPU."""
    results = []
    for version in NOTEBOOK_VERSIONS:
        rows = _results(f"notebook-*-torch-{version}.json")
        results.append({(row["library"], row["batch_size"]): row for row in rows})
    return _markdown(
        (
            *("library", "batch", "figure", "published, MB"),
            *(f"torch {version}, MB (error)" for version in NOTEBOOK_VERSIONS),
        ),
        [
            (
                *(library, str(size), kind, f"{expected:.2f}"),
                *(_beside(found[library, size][f"{kind}_bytes"], expected) for found in results),
            )
            for library, published in PUBLISHED.items()
            for size, figures in published.items()
            for kind, expected in figures._asdict().items()
        ],
    )


def _beside(found: int, published_mb: float) -> str:
    if published_mb == 0:
        return f"{found / MB:.2f}"
    error = f"{found / MB / published_mb - 1:+.2%}".replace("%", " %")
    return f"{found / MB:.2f} ({error})"


def gates() -> str:
    """The report of the gates, from the JSON that the same session wrote."""
    (file,) = RESULTS.glob("gates-*.json")
    report = "".join(f"{line.text}\n" for line in terminal.section(read(file), _COLUMNS))
    return f"```text\n{report}```\n"


def _pair(row: Row) -> str:
    return f"{row['peak_bytes'] / MB:.2f} / {row['retained_bytes'] / MB:.2f}"


def leaks() -> str:
    """Which tools find the leaks of the gallery, and which accuse the repaired code."""
    (file,) = RESULTS.glob("leaks-torch-*.json")
    rows = []
    for tool, found in json.loads(file.read_text("utf-8")).items():
        missed, accused = (
            ", ".join(row["leak"] for row in found["rows"] if row[key] is value) or "-"
            for key, value in (("found", False), ("accused", True))
        )
        total = sum(row["found"] for row in found["rows"])
        is_own = tool == "pytest-cka-memory"
        name = tool if is_own else f"pytest-memray {found['pytest-memray']}, `{tool}`"
        rows.append((name, found["python"], f"{total} of {len(found['rows'])}", missed, accused))
    return _markdown(("tool", "Python", "leaks found", "missed", "repairs accused"), rows)


def tensors() -> str:
    """What one more live tensor costs the end of a region."""
    return _markdown(cost_tables.head(), cost_tables.rows(_results("unit-cost-*.json")))


def explanations() -> str:
    """What it takes to explain a region that retains many tensors."""
    found = _results("explanation-cost-*.json")
    return _markdown(cost_tables.explanation_head(), cost_tables.explanation_rows(found))


def programs_on_machines() -> str:
    """How many programs each comparison finds worse on another machine."""
    found = _results("machines-programs-*.json")
    total = {
        kind: sum(row["programs"] for row in found if row["planted"] == kind) for kind in _BOTH
    }
    return _markdown(
        ("judged by", "unchanged programs found worse", "programs that need 10 % more found"),
        [
            (name, *(f"{_sum(found, name, kind):,} of {total[kind]:,}" for kind in _BOTH))
            for name in ("baseline", "compare", "trend", "relation")
        ],
    )


_BOTH = (False, True)


def _sum(found: list[Row], name: str, planted: bool) -> int:
    return sum(row[name] for row in found if row["planted"] == planted)


def networks_on_machines() -> str:
    """How many peaks of networks differ from those with one thread."""
    first, *others = _results("machines-networks-*.json")
    rows = []
    for row in others:
        pairs = [(first["peaks"][name], peaks) for name, peaks in row["peaks"].items()]
        differ = (sum(old[at] != new[at] for old, new in pairs) for at in (0, 1))
        most = max(abs(new[1] - old[1]) for old, new in pairs)
        counts = (f"{count} of {len(pairs)}" for count in differ)
        rows.append((str(row["threads"]), row["instructions"], *counts, f"{most:,} bytes"))
    head = (
        "threads",
        "instruction set",
        "peaks that differ",
        "without scratch memory",
        "at most by",
    )
    return _markdown(head, rows)


def _results(pattern: str) -> list[Row]:
    return [
        row
        for file in sorted(RESULTS.glob(pattern))
        for row in json.loads(file.read_text(encoding="utf-8"))
    ]


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


DOCS = ROOT / "docs"
TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    DOCS / "explanation" / "cka.md": {
        "chance": cka_tables.chance,
        "intervals": cka_tables.intervals,
        "cost of resamples": cka_tables.cost,
        "passes": cka_tables.passes,
        "measures": cka_tables.measures,
        "measures by chance": cka_tables.measures_by_chance,
        "parts of batches": cka_tables.parts,
        "sanity check": cka_tables.sanity,
    },
    DOCS / "explanation" / "cost.md": {"tensors": tensors, "explanations": explanations},
    DOCS / "explanation" / "figures.md": {
        "gates": gates,
        "programs on machines": programs_on_machines,
        "networks on machines": networks_on_machines,
    },
    DOCS / "explanation" / "compiled.md": {
        "functions": compiled_tables.functions,
        "suites": compiled_tables.suites,
        "operators": compiled_tables.operators,
        "cost": compiled_tables.cost,
        "what goes wrong": compiled_tables.hostile,
    },
    DOCS / "explanation" / "ranks.md": {
        "fine-tuning": ranks_tables.finetuning,
        "losses": ranks_tables.losses,
        "tracker": ranks_tables.tracker,
        "accelerate": ranks_tables.accelerate,
        "PyTorch's tests": ranks_tables.own_tests,
        "PyTorch's files": ranks_tables.files,
        "PyTorch's files, by reason": ranks_tables.file_causes,
        "what goes wrong": ranks_tables.hostile,
    },
    DOCS / "explanation" / "real-cards.md": real_cards_tables.TABLES,
    DOCS / "explanation" / "h100.md": card_tables.TABLES,
    DOCS / "explanation" / "trust.md": {
        "leaks": leaks,
        "suites' reserve": snapshot_tables.suites,
        "versions": versions,
        "skipped, by version": skips,
    },
    DOCS / "how-to" / "snapshots.md": {"recordings": snapshot_tables.recordings},
    DOCS / "how-to" / "repairs.md": {
        "repairs": repairs_tables.repairs,
        "repairs-published": repairs_tables.published_repairs,
    },
    DOCS / "how-to" / "laws.md": {"laws": law_tables.laws},
    DOCS / "explanation" / "values.md": {
        "suites": values_tables.suites,
        "shares of suites": values_tables.shares,
        "foreign programs": foreign_tables.programs,
        "why foreign tests fail": foreign_tables.reasons,
        "share of foreign programs": foreign_tables.share,
    },
    DOCS / "explanation" / "libraries.md": {
        "libraries": libraries,
        "side by side": side_by_side,
        "notebook": notebook,
    },
    ROOT / "benchmarks" / "README.md": {
        "results": scripts_tables.results,
        "programs": scripts_tables.programs,
        "parts": scripts_tables.parts,
    },
}
"""Page -> name of each of its tables -> what draws it."""


def drawn(page: Path, text: str) -> str:
    """Return the text of a page with every table drawn again.

    Raises:
        ValueError: if the page has no place for one of its tables.
    """
    for name, table in TABLES[page].items():
        head, foot = f"<!-- drawn: {name} -->\n\n", "\n<!-- end -->"
        before, found, rest = text.partition(head)
        if not found or foot not in rest:
            raise ValueError(f"{page.name} has no place for the table {name!r}: {head}...{foot}")
        text = before + head + table() + foot + rest.split(foot, 1)[1]
    return text


def main() -> None:
    """Rewrite every page in which a table differs."""
    changed: set[str] = set()
    for page in TABLES:
        before = page.read_text(encoding="utf-8")
        after = drawn(page, before)
        write_whole(page, after)
        changed |= set(after.splitlines()) - set(before.splitlines())
    print("\n".join(sorted(changed)) or "nothing changed")


if __name__ == "__main__":
    main()
