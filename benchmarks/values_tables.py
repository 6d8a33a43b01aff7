"""The tables of other projects' tests on the emulated device and on the CPU."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COUNTS = {
    "tests run": "ran",
    "allocate on the device": "allocating",
    "same outcome": "same",
    "of these, fail on both": "failed on both",
    "skipped on the CPU": "skipped on the CPU",
    "refused by PyTorch": "refused by PyTorch",
    "other outcome": "other",
}
"""Columns of the table -> keys in the file."""


def suites() -> str:
    """Counts of tests by outcome, for every suite and for those that use the device."""
    using, others = using_the_device(), [row for row in measured() if not uses_the_device(row)]
    lines = [
        ["suite", "version", *COUNTS],
        ["---"] * (2 + len(COUNTS)),
        *(_line(row) for row in using),
        ["all of these", "", *(f"{total(key):,}" for key in COUNTS.values())],
        *(_line(row) for row in others),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _line(row: dict[str, Any]) -> list[str]:
    counts = [f"{row[key]:,}" for key in COUNTS.values()]
    return [row["suite"], f"`{row['version']}`", *counts]


def shares() -> str:
    """Which share of the tests has the same outcome, and of those that can have it."""
    ran, same = total("ran"), total("same")
    run_here = ran - total("skipped on the CPU")
    accepted = run_here - total("refused by PyTorch")
    return "".join(
        f"- {text}, {100 * same / count:.{digits}f} %{verb} ({same:,} of {count:,}).\n"
        for text, count, digits, verb in (
            ("As counted", ran, 1, " have the same outcome"),
            ("Without the tests that pass here and that the CPU skips", run_here, 1, ""),
            ("Without those that PyTorch refuses on any card as well", accepted, 2, ""),
        )
    )


def total(key: str) -> int:
    """Return the sum of a count over the suites that use the device."""
    return sum(row[key] for row in using_the_device())


def using_the_device() -> list[dict[str, Any]]:
    """Return the rows that count."""
    return [row for row in measured() if uses_the_device(row)]


def uses_the_device(row: dict[str, Any]) -> bool:
    """Return whether more than one test of a hundred allocates memory on the device."""
    return bool(100 * row["allocating"] > row["ran"])


def measured() -> list[dict[str, Any]]:
    """Return the rows that ``emulated_suites.py`` wrote."""
    (file,) = RESULTS.glob("emulated-suites-torch-*.json")
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["suites"]
    return rows
