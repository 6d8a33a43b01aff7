"""Tables of replayed recordings, and of what is said of the reserve of other projects' tests."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_CAUSES = {
    "codeasier/MemSnapDump": "recorded on an Ascend NPU (torch_npu), whose allocator is another",
}
"""Repository -> why its recordings cannot be equal."""


def recordings() -> str:
    """The recordings of each repository, and how many are replayed exactly."""
    (file,) = RESULTS.glob("recordings-torch-*.json")
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    by_repository: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "error" not in row and row["events"] > 1:
            name = "/".join(row["recording"].split("+")[:2])
            by_repository.setdefault(name, []).append(row)
    head = ["repository", "recordings", "what is special", "allocations", "growths", "exact"]
    lines = [head, ["---", "---:", "---", "---:", "---:", "---"]]
    lines += [
        _line(name, found)
        for name, found in sorted(by_repository.items(), key=lambda it: it[0].lower())
    ]
    found = [row for each in by_repository.values() for row in each]
    lines.append(["all", *_line("", found)[1:2], "", *_line("", found)[3:5], _exact(found)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _line(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    exact = _exact(rows)
    return [
        f"[{name}](https://github.com/{name})",
        str(len(rows)),
        ", ".join(_special(rows)) or "-",
        f"{sum(row['allocations'] for row in rows):,}",
        f"{sum(row['growths'] for row in rows):,}",
        f"{exact}: {_CAUSES[name]}" if name in _CAUSES else exact,
    ]


def _special(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [f"`{row['settings']}`" for row in rows if row["settings"]]
    devices = 1 + max(row["device"] for row in rows)
    streams = max(row["streams"] for row in rows)
    found += [f"{devices} cards"] if devices > 1 else []
    found += [f"{streams} streams"] if streams > 1 else []
    found += ["out of memory"] if any(row["out_of_memory"] for row in rows) else []
    full = any(row["releases_of_a_full_card"] for row in rows)
    found += ["a card that was full"] if full else []
    return list(dict.fromkeys(found))


def _exact(rows: Sequence[Mapping[str, Any]]) -> str:
    exact = sum(row["differing"] == 0 for row in rows)
    return "all" if exact == len(rows) else f"{exact} of {len(rows)}"


def suites() -> str:
    """What is said of the reserve in suites of other projects, on the emulated card."""
    (file,) = RESULTS.glob("reserve-suites-torch-*.json")
    found = json.loads(file.read_text(encoding="utf-8"))["suites"]
    head = ["project", "tests that pass", "regions on the card", "judged", "growing in use"]
    lines = [[*head, "accused of a growing reserve"], ["---", *["---:"] * 5]]
    for row in found:
        counts = ("on_the_card", "with_enough_batches", "in_use_grows")
        cells = [f"{row['passed']} of {row['tests']}", *(str(row[name]) for name in counts)]
        accused = len(row["notes"]) + len(row["limit_breaks"])
        lines.append([f"{row['suite']} {row['version']}", *cells, str(accused)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
