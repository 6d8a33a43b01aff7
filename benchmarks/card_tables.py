"""The tables of what a real card was asked for, beside an emulated one."""

import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "card-h100"
MB = 2**20
Rows = list[dict[str, Any]]


def _found() -> dict[str, Any]:
    return _read("compared.json")


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return found


def programs() -> str:
    """Each program: its requests, its peak and its reserve."""
    lines = [
        ("program", "requests and frees", "equal", "peak, MB", "here", "reserve, MB", "here"),
        ("---", "---:", "---", "---:", "---:", "---:", "---:"),
    ]
    for row in _found()["programs"]:
        if "card_failed" in row or "here_failed" in row:
            side = "card" if "card_failed" in row else "emulated card"
            lines.append((row["name"], "-", f"fails on the {side}", *("-",) * 4))
            continue
        lines.append(
            (
                row["name"],
                f"{row['card_events']:,}",
                _WORDS[row["outcome"]],
                *_sizes(row, "peak"),
                *_sizes(row, "peak_reserved"),
            )
        )
    return _table(lines)


_WORDS = {
    "equal": "all",
    "equal blocks": "all blocks",
    "another order": "all, in another order",
    "equal peak": "the peak",
    "different": "no",
}


def _sizes(row: dict[str, Any], kind: str) -> tuple[str, str]:
    card, here = row[f"card_{kind}"], row[f"here_{kind}"]
    return f"{card / MB:,.2f}", "equal" if here == card else f"{here / card - 1:+.3%}"


def layers() -> str:
    """Each family: how many cases ask for the same."""
    groups: dict[str, Rows] = defaultdict(list)
    for row in _found()["layers"]:
        groups[row["name"].partition(": ")[0].replace("_", " ")].append(row)
    lines = [
        (
            *("layers and functions", "cases", "all requests equal", "peak equal"),
            "worst peak of 1 MB and more",
        ),
        ("---", "---:", "---:", "---:", "---:"),
    ]
    whole: Rows = []
    for name, rows in groups.items():
        both = [row for row in rows if "card_failed" not in row]
        whole += both
        lines.append((name, *_counts(both)))
    lines.append(("**all**", *_counts(whole)))
    return _table(lines)


def _counts(rows: Rows) -> tuple[str, ...]:
    ran = [row for row in rows if "here_failed" not in row]
    equal = sum(row["outcome"] in ("equal", "equal blocks") for row in ran)
    peaks = sum(row["card_peak"] == row["here_peak"] for row in ran)
    errors = [row["here_peak"] / row["card_peak"] - 1 for row in ran if row["card_peak"] >= MB]
    worst = max(errors, key=abs, default=0.0)
    return f"{len(rows)}", f"{equal}", f"{peaks}", "-" if not worst else f"{worst:+.1%}"


def summary() -> str:
    """Medians and shares of the programs."""
    rows = [row for row in _found()["programs"] if "card_peak" in row and "here_peak" in row]
    lines = [
        ("figure", "programs", "equal", "within 0.05 %", "within 1 %", "within 3 %", "median off"),
        ("---", *("---:",) * 6),
    ]
    for name, kind in (("peak allocated", "peak"), ("peak reserved", "peak_reserved")):
        errors = [abs(row[f"here_{kind}"] / row[f"card_{kind}"] - 1) for row in rows]
        lines.append(
            (
                name,
                f"{len(errors)}",
                *(f"{sum(error <= most for error in errors)}" for most in (0, 5e-4, 1e-2, 3e-2)),
                f"{statistics.median(errors):.4%}",
            )
        )
    kinds = Counter(row["outcome"] for row in rows)
    same = kinds["equal"] + kinds["another order"]
    return (
        f"{_table(lines)}\n{same} of {len(rows)} programs make the same requests and frees, "
        f"{kinds['equal']} of them in the same order.\n"
    )


def repairs() -> str:
    """What each change saves on the card and on an emulated one."""
    lines = [
        ("change", "peak on the card, MB", "emulated", "reserve on the card, MB", "emulated"),
        ("---", *("---:",) * 4),
    ]
    for name, row in _read("commands.json")["repairs"].items():
        card, here = row["card"], row["emulated"]
        lines.append(
            (
                name,
                *(f"{card['peak_mb']:,.2f}", f"{here['peak_mb']:,.2f}"),
                *(f"{card['reserved_mb']:,.2f}", f"{here['reserved_mb']:,.2f}"),
            )
        )
    return _table(lines)


def context() -> str:
    """What lies beside the reserve at moments of a process."""
    moments = _read("device.json")["context"]["moments"]
    lines = [("after", "beside the reserve, MB", "nvidia-smi, MiB"), ("---", "---:", "---:")]
    for name, row in moments.items():
        lines.append((name, f"{row['beside_bytes'] / MB:,.1f}", f"{row['smi_mib']}"))
    return _table(lines)


def _table(lines: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES = {
    "card, summary": summary,
    "card, programs": programs,
    "card, layers": layers,
    "card, repairs": repairs,
    "card, context": context,
}
