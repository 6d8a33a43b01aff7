"""The tables of the rows that `versions.py` has written."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "versions"
_TESTS = ("gates", "suite", "without_kernel")
_SHOWN = 4  # names in a cell; the row's file has all of them
Row = dict[str, Any]


def versions(folder: Path = RESULTS) -> str:
    """Each version of torch, Python and pytest: what was run and what came out."""
    columns: dict[str, Callable[[Row], str]] = {
        "torch (CUDA)": lambda row: f"{row['torch']} ({row['cuda']})",
        "Python": lambda row: row["python"],
        "pytest, xdist": lambda row: f"{row['pytest']}, {row['xdist']}",
        "date, commit": lambda row: f"{row['date']}, {', '.join(row['commits'])}",
        "gates": _passed("gates"),
        "tests passed": _passed("suite"),
        "skipped": lambda row: str(_skipped(row)),
        "cka without its kernel": _passed("without_kernel"),
        "operators that agree": _agreeing,
        "operators that raise": _raising,
        "published figures, off by": _published,
    }
    rows = [[cell(row) for cell in columns.values()] for row in rows_in(folder)]
    return _markdown(list(columns), rows)


def skips(folder: Path = RESULTS) -> str:
    """How many tests of the suite each row skipped, by reason."""
    found = rows_in(folder)
    reasons = sorted({reason for row in found for reason in _reasons(row)})
    names = (f"{row['torch']}, Python {row['python']}, pytest {row['pytest']}" for row in found)
    head = ["skipped because", *names]
    return _markdown(
        head,
        [
            [reason.replace("|", "\\|"), *(str(_reasons(row).get(reason, 0)) for row in found)]
            for reason in reasons
        ],
    )


def rows_in(folder: Path) -> list[Row]:
    """Return all rows: the oldest torch first, then the oldest Python and pytest."""

    def numbers(version: str) -> list[int]:
        return [int(part) if part.isdigit() else 0 for part in version.split(".")]

    rows = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    keys = ("torch", "python", "pytest")
    return sorted(rows, key=lambda row: [numbers(row[key]) for key in keys])


def _step(row: Row, name: str) -> Row:
    step: Row = row["steps"].get(name, {})
    return step


def _reasons(row: Row) -> dict[str, int]:
    reasons: dict[str, int] = _step(row, "suite").get("skipped", {})
    return reasons


def _skipped(row: Row) -> int:
    return sum(_reasons(row).values())


def _passed(name: str) -> Callable[[Row], str]:
    """Return what shows the outcome of a step that runs tests."""

    def cell(row: Row) -> str:
        step = _step(row, name)
        if "passed" not in step:
            return f"ended with {step['exit_status']}" if step else "not run"
        failed = step["failed"]
        if not failed and not step["ok"]:
            return f"{step['passed']:,}, ended with {step['exit_status']}"
        return f"{step['passed']:,}" + (f", **{len(failed)} failed**" if failed else "")

    return cell


def _agreeing(row: Row) -> str:
    step = _step(row, "opinfo")
    if "agreeing" not in step:
        return "failed" if step else "not run"
    wrong = {*step["other_values"], *step["crashed"]}
    parts = [f"{step['agreeing']} of {step['operators']}"]
    if step.get("of_the_cpu"):  # rows before it was looked for have none
        parts.append(f"with single precision, not the CPU: {_names(step['of_the_cpu'])}")
    if wrong:
        parts.append(f"wrong: {_names(wrong)}")
    return "; ".join(parts)


def _raising(row: Row) -> str:
    step = _step(row, "opinfo")
    if "raising" not in step:
        return "-"
    refused = step["refused_by_torch"]
    parts = [f"**{_names(step['raising'])}**"] if step["raising"] else []
    parts += [f"not in torch's CUDA build: {_names(refused)}"] if refused else []
    return "; ".join(parts) or "none"


def _published(row: Row) -> str:
    step = _step(row, "published")
    if not step.get("figures"):
        return "failed" if step else "not run"
    return "; ".join(
        f"{figure['figure']}: {figure['bytes'] - figure['published']:+,} bytes"
        for figure in step["figures"]
    )


def _names(names: Iterable[str]) -> str:
    shown = [f"`{name}`" for name in sorted(names)]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
