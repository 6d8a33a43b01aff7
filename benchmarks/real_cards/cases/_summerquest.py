"""Scripts of a summer course's students, which train and measure on a card of 24 GB."""

import csv
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _attention import table
from case import Figure

STUDENTS = "OpenMOSS/SummerQuest-2026@4921b29842778ef696a9c16d9280f2595dddde9a"
COURSE = "stanford-cs336/assignment2-systems@9d95f3b"
COUNTS = {"peak_allocated_mib": "peak allocated", "peak_reserved_mib": "peak reserved"}


def programs(student: str) -> dict[str, Sequence[str]]:
    """Return what a student's scripts need: their own folder, and the course's language model."""
    folder = f"students/{student}/assignments/A2-K/submission"
    return {STUDENTS: (folder,), COURSE: ("cs336-basics",)}


def rows(
    student: str, module: str, arguments: Sequence[str], file: str = ""
) -> list[dict[str, str]]:
    """Run one of a student's scripts in this process; return the rows that it writes.

    Args:
        student: the folder's name.
        module: of the script, below ``student_scripts.a2k``.
        arguments: of its command line, without the one for the output.
        file: what it writes in a folder for outputs; if empty, it is given the file's name.
    """
    import torch

    place = Path(os.environ["REAL_CARDS_PROGRAM"])
    folder = place / f"students/{student}/assignments/A2-K/submission"
    sys.path[:0] = [str(folder), str(place / "cs336-basics")]
    os.chdir(folder)
    into = folder / "written" / (file or "rows.csv")
    into.unlink(missing_ok=True)
    output = ["--output-dir", str(into.parent)] if file else ["--output", str(into)]
    torch.nn.init.trunc_normal_ = _left_as_it_is
    sys.argv = [module, *arguments, *output]
    try:
        runpy.run_module(f"student_scripts.a2k.{module}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
    with into.open(encoding="utf-8") as written:
        return list(csv.DictReader(written))


def _left_as_it_is(tensor: Any, *_arguments: Any, **_named: Any) -> Any:
    """Give a weight on the CPU no values: that would take a minute, and its memory."""
    return tensor


def sizes(name: str, row: dict[str, str]) -> dict[str, int]:
    """Return the two peaks of a row, in bytes."""
    return {f"{name}, {counts}": round(float(row[key]) * 2**20) for key, counts in COUNTS.items()}


def training(tokens: str, layers: str) -> str:
    """Return the name of a row of training."""
    return f"training, {tokens} tokens, {layers} layers in a checkpoint"


def attention(tokens: str, width: str, passes: str) -> str:
    """Return the name of a row of attention."""
    return f"attention, {tokens} x {width}, {passes}"


def figures(training_rows: str, attention_rows: str) -> dict[str, Figure]:
    """Return the figures of two tables."""
    found = {}
    for name, row in [
        *((training(*row[:2]), row[2:]) for row in table(training_rows)),
        *((attention(*row[:3]), row[3:]) for row in table(attention_rows)),
    ]:
        kind = "operators" if name.startswith("attention") else ""
        for size, counts in zip(row, COUNTS.values(), strict=True):
            found[f"{name}, {counts}"] = Figure(size, "MiB", counts, kind)
    return found
