"""The tables of other projects' programs and tests on an emulated card."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from foreign_reasons import KINDS, reason_of

RESULTS = Path(__file__).parent / "results"
_NOT_POSSIBLE = ("card", "machine")
"""Kinds of failures that do not count against the device."""


def programs() -> str:
    """What was asked of each project, and how it ended."""
    lines = [["program", "version", "what was asked", "outcome", "MB"], ["---"] * 5]
    for name, row in measured().items():
        outcome = _of_tests(row) if "passed" in row else _of_program(row)
        allocated = "-" if row["allocated_mb"] is None else f"{row['allocated_mb']:,.0f}"
        lines.append([name, f"`{row['version']}`", row["asked"], outcome, allocated])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def reasons() -> str:
    """Why tests failed, with how many for each cause."""
    counts = Counter(
        reason_of(**failure) for row in measured().values() for failure in row.get("failures", ())
    )
    lines = [["kind", "cause", "tests"], ["---"] * 3]
    order = list(KINDS)
    for (kind, cause), count in sorted(
        counts.items(), key=lambda found: (order.index(found[0][0]), -found[1])
    ):
        lines.append([KINDS[kind], cause or "-", str(count)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def share() -> str:
    """Which share passed of what a card and this machine could run."""
    rows = measured().values()
    passed = sum(row["passed"] if "passed" in row else _ran(row) for row in rows)
    failed = sum(
        reason_of(**failure)[0] not in _NOT_POSSIBLE
        for row in rows
        for failure in row.get("failures", ())
    ) + sum("passed" not in row and not _ran(row) for row in rows)
    of = passed + failed
    return (
        f"{passed:,} of {of:,} ({100 * passed / of:.1f} %) of the programs and tests that a card "
        "and this machine could run end as they should.\n"
    )


def measured() -> dict[str, dict[str, Any]]:
    """Return the rows that ``foreign_programs.py`` wrote, by name."""
    (file,) = RESULTS.glob("foreign-programs-torch-*.json")
    rows: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["programs"]
    return rows


def _ran(row: dict[str, Any]) -> bool:
    return row.get("exit_status") == 0 or (not row["ended"] and "training" in str(row["printed"]))


def _of_program(row: dict[str, Any]) -> str:
    if not row["ended"]:
        return f"ran until it was stopped, after {row['seconds']} s"
    return "runs" if row["exit_status"] == 0 else f"ended with status {row['exit_status']}"


def _of_tests(row: dict[str, Any]) -> str:
    kinds = Counter(reason_of(**failure)[0] for failure in row["failures"])
    late = len(row.get("passed with late events", ()))
    parts = [f"{row['passed']} pass" + (f" ({late} with `--late-events`)" if late else "")]
    if row["skipped"]:
        parts.append(f"{row['skipped']} are skipped")
    parts += [f"{kinds[kind]} {text}" for kind, text in _SHORT.items() if kinds[kind]]
    if not row["ended"]:
        parts.append("stopped by the limit of time")
    return ", ".join(parts)


_SHORT = {
    "card": "fail on a card too",
    "machine": "need more of this machine",
    "refused": "refused",
    "device": "differ",
    "open": "not examined",
}
