"""The table of public programs, and of what lowers their peaks."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
GB = 2**30


def repairs() -> str:
    """Each program with its best single change and combination that keep the results."""
    (file,) = RESULTS.glob("repairs-torch-*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    head = ("program", "peak, GB", "change", "then, GB", "saved", "copy's peak", "gradients")
    lines = [head, ("---", "---:", "---", "---:", "---:", "---", "---")]
    for name, row in found["programs"].items():
        if "error" in row:
            lines.append((name, "-", f"does not run: {row['error'][:60]}", *("-",) * 4))
            continue
        for number, each in enumerate(row["recommended"]):
            first = (name, f"{row['peak_bytes'] / GB:.2f}") if not number else ("", "")
            lines.append((*first, *_of_change(row, each)))
        if not row["recommended"]:
            lines.append((name, f"{row['peak_bytes'] / GB:.2f}", "nothing", *("-",) * 4))
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    total = found["summary"]
    return (
        f"{table}\nMedian saving without a change of results: "
        f"{total['median_saving_percent']:.0f} % of {total['programs']} programs; "
        f"{total['copies_with_the_predicted_peak']} of {total['copies']} copies have the predicted "
        "peak.\n"
    )


def published_repairs() -> str:
    """The reserve under each change that a pull request has published, beside the search's."""
    (file,) = RESULTS.glob("repairs-torch-*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["published"]
    lines = [("change", "on a card, GB", "here, GB", "off"), ("---", "---:", "---:", "---:")]
    for name, row in found.items():
        known, reserved = row["published_gib"], row["reserved_gib"]
        off = f"{100 * (reserved / known - 1):+.1f} %"
        lines.append((name, f"{known:.3f}", f"{reserved:.3f}", off))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _of_change(row: dict[str, Any], each: dict[str, Any]) -> tuple[str, ...]:
    saved = 100 * (1 - each["peak_bytes"] / row["peak_bytes"])
    return (
        each["change"],
        f"{each['peak_bytes'] / GB:.2f}",
        f"{saved:.0f} %",
        _copy(each),
        _values(each),
    )


def _copy(each: dict[str, Any]) -> str:
    copy = each.get("copy")
    if copy is None:
        return "not written: the place is not known"
    if "peak_bytes" not in copy:
        return f"does not run: {copy['error'][:60]}"
    off = copy["peak_bytes"] - each["peak_bytes"]
    return "as predicted" if not off else f"{off:+,} bytes"


def _values(each: dict[str, Any]) -> str:
    values = each.get("values")
    if values is None:
        return "-"
    if "error" in values:
        return f"not compared: {values['error'][:60]}"
    how = "equal" if values["equal"] else f"differ by {values['largest']:.0e}"
    return f"{how} ({values['compared']} tensors)"
