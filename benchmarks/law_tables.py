"""The table of laws that were compared with what was measured beyond them."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def laws() -> str:
    """The law of each model, and its error at 16 times the largest sizes."""
    (file,) = RESULTS.glob("laws-torch-*.json")
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    head = ["model", "runs", "seconds", "the last term of the largest piece", "off at 16 times"]
    lines = [
        head,
        ["---", "---:", "---:", "---", "---"],
        *([row["model"], str(row["runs"]), f"{row['seconds']:.1f}", _term(row), _off(row)]
          for row in rows),
    ]  # fmt: skip
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _term(row: dict[str, Any]) -> str:
    """Return the last term, which has the highest powers."""
    about = "" if row["exact"] else "about "
    return about + str(row["law"]).replace(" - ", " + -").rpartition(" + ")[2]


def _off(row: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}: {_difference(far)}"
        for name, far in zip(row["far"][0]["sizes"], row["far"], strict=True)
    )


def _difference(far: dict[str, Any]) -> str:
    if not far["off"]:
        return "0 bytes"
    said = "" if far["safe"] else ", said to be unsure"
    return f"{far['percent']:.2f} %{said}"
