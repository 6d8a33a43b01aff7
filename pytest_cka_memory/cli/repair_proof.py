"""Prove what a report recommends: run the patched copies, and compare what they compute."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pytest_cka_memory.errors import CkaMemoryError
from pytest_cka_memory.plugin.repair_session import MEASURE, VALUES, Task
from pytest_cka_memory.units import format_exact

SECONDS = 120.0
"""A run with values that takes longer is given up."""
_COPIED = {".py", ".toml", ".ini", ".cfg", ".json", ".yaml", ".yml", ".txt"}
_SKIPPED = {".git", "node_modules", "__pycache__", "site-packages", ".venv", "venv", "build"}
_MOST_BYTES = 2**20
_MOST_FILES = 5_000


class Sessions(Protocol):
    """Starts sessions of pytest."""

    device: str

    @property
    def results(self) -> Callable[..., list[dict[str, Any]]]:
        """Runs one; returns what it found for each test."""


def lines(session: Sessions, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the proof of each recommended change has shown."""
    for each in found.get("recommended", ()):
        if not each["files"]:
            yield f"not proven: {each['name']}: the place of the edit is not known"
            continue
        with tempfile.TemporaryDirectory(prefix="pytest-cka-memory-copy-") as made:
            folder = _copy(Path.cwd(), Path(made), each["files"])
            yield _about_peak(session, found["test"], each, folder)
            yield _about_values(session, found["test"], each, folder)


def _copy(root: Path, made: Path, files: Mapping[str, str]) -> Path:
    """Copy the small text files below `root`, some of them with a new text; return the folder."""
    count = 0
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        if _SKIPPED & set(relative.parts) or path.suffix not in _COPIED or not path.is_file():
            continue
        if path.stat().st_size > _MOST_BYTES or count > _MOST_FILES:
            continue
        count += 1
        target = made / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for file, text in files.items():
        target = made / Path(file).relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return made


def _about_peak(session: Sessions, test: str, each: Mapping[str, Any], folder: Path) -> str:
    found = _first(session, Task("", MEASURE), folder=folder, tests=[test])
    if "error" in found:
        return f"not proven: {each['name']}: the patched copy does not run: {found['error']}"
    measured, predicted = found["peak_bytes"], each["peak_bytes"]
    if measured == predicted:
        return f"proven: {each['name']}: the patched copy has the peak {format_exact(measured)}"
    return (
        f"not proven: {each['name']}: the patched copy has the peak {format_exact(measured)}, "
        f"and {format_exact(predicted)} were predicted"
    )


def _about_values(session: Sessions, test: str, each: Mapping[str, Any], folder: Path) -> str:
    from pytest_cka_memory.repair.proof import LAST_DIGITS, difference

    device = session.device.replace(",values=off", "")
    kept = []
    for place, name in ((None, "before"), (folder, "after")):
        task = Task(str(folder / f"{name}.json"), VALUES)
        found = _first(session, task, folder=place, tests=[test], device=device, timeout=SECONDS)
        if "error" in found:
            return f"numbers not compared: {found['error']}"
        kept.append(found["values"])
    try:
        result = difference(*kept)
    except ValueError as error:
        return f"numbers: they differ: {error}"
    if not result.compared:
        return "numbers not compared: the test has no loss, gradient or result of a model"
    compared = f"{result.compared} losses, gradients and results compared"
    if result.is_equal:
        return f"numbers: equal, bit for bit ({compared})"
    largest = f"by {result.largest:.1e} of the largest element at most, in the {result.where}"
    if each["numbers"].startswith("change"):
        return f"numbers: they differ {largest}, as named: {each['numbers']} ({compared})"
    if each["numbers"] and result.largest <= LAST_DIGITS:
        return f"numbers: the last digits differ, {largest} ({compared})"
    return f"numbers: THEY DIFFER, which was not promised: {largest} ({compared})"


def _first(session: Sessions, task: Task, **options: Any) -> dict[str, Any]:
    try:
        found: Sequence[dict[str, Any]] = session.results(task, **options)
    except subprocess.TimeoutExpired as error:
        return {"error": f"it takes longer than {error.timeout:.0f} s"}
    except CkaMemoryError as error:
        return {"error": str(error)}
    return found[0]
