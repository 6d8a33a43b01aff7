"""Prove what a report recommends: run the patched copies, and compare what they compute."""

import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pytest_cka_memory.errors import CkaMemoryError
from pytest_cka_memory.plugin.repair_session import MEASURE, VALUES, Task
from pytest_cka_memory.repair.smaller import Sizes, instead_of
from pytest_cka_memory.units import format_exact

if TYPE_CHECKING:
    from pytest_cka_memory.repair.proof import Difference

SECONDS = 120.0
"""A run with values that takes longer is given up."""
_FLOPS = 5e9
"""Floating-point operations that the host surely computes in a second."""
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
            yield _about_values(session, found, each, folder)


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


def _about_values(
    session: Sessions, found: Mapping[str, Any], each: Mapping[str, Any], folder: Path
) -> str:
    from pytest_cka_memory.repair.proof import difference

    before = Sizes(*found["sizes"])
    error = ""
    for sizes in _sizes(found):
        kept = _kept(session, found["test"], folder, before, sizes)
        if isinstance(kept, str):
            error = error or kept
            continue
        try:
            result = difference(*kept)
        except ValueError as differing:
            return f"numbers: they differ: {differing}"
        smaller = "" if sizes == before else f"; with {instead_of(before, sizes)}"
        return _compared(each, result, smaller)
    return f"numbers not compared: {error}"


def _sizes(found: Mapping[str, Any]) -> Iterator[Sizes]:
    """Yield the sizes to run with: as they are unless that takes too long, then smaller ones."""
    before = Sizes(*found["sizes"])
    flops, peak = found.get("flops") or 0, found.get("peak_bytes") or 0
    tried = [before, *before.smaller]
    for number, sizes in enumerate(tried):
        share = sizes.share / before.share
        fits = peak * share < _available_bytes() / 2 and flops * share < _FLOPS * SECONDS
        if fits or number == len(tried) - 1:
            yield from tried[number:]
            return


def _available_bytes() -> float:
    """Return the bytes that the host has available; infinity where it does not say so."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return math.inf
    kilobytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * float(next(kilobytes, math.inf))


def _kept(
    session: Sessions, test: str, folder: Path, before: Sizes, sizes: Sizes
) -> tuple[str, str] | str:
    """Return the files with the values before and after, or why there are none."""
    device = session.device.replace(",values=off", "")
    kept = []
    for place, name in ((None, "before"), (folder, "after")):
        task = Task(
            str(folder / f"{name}-{sizes.batch}-{sizes.tokens}.json"),
            VALUES,
            sizes=(astuple(before), astuple(sizes)),
        )
        found = _first(session, task, folder=place, tests=[test], device=device, timeout=SECONDS)
        if "error" in found:
            return str(found["error"])
        if sizes != before and not found["shrunk"]:
            return "the test does not make its inputs with sizes that could be smaller"
        kept.append(found["values"])
    return kept[0], kept[1]


def _compared(each: Mapping[str, Any], result: "Difference", smaller: str) -> str:
    from pytest_cka_memory.repair.proof import LAST_DIGITS

    if not result.compared:
        return "numbers not compared: the test has no loss, gradient or result of a model"
    compared = f"{result.compared} losses, gradients and results compared{smaller}"
    if result.is_equal:
        return f"numbers: equal, bit for bit ({compared})"
    largest = f"by {result.largest:.1e} of the largest element at most, in the {result.where}"
    if "change" in each["numbers"]:
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
