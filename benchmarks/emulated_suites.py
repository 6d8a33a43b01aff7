"""Run the test suites of other projects on the emulated device and on the CPU, and compare.

``python benchmarks/emulated_suites.py FOLDER [NAME ...]`` expects a clone of each project in
FOLDER, under the name of its repository, and what its tests import. For transformers it expects the
unpacked source distribution of the installed version. It prints one row for every suite: tests run
in a session with the device, how many of them allocated memory on it, how many have the same
outcome as on the CPU, and the others by cause.

A suite has a switch for the device, or parametrizes its tests over the devices that there are; then
the two forms of a test are compared.

Tests that mix devices run a third time, with ``values=off``. Then no code of this plugin runs
in an operator, only PyTorch's own. If PyTorch's check of devices raises there, a card refuses that
line of the project as well. A test may also stop earlier without values.

With ``--keep FOLDER`` the outcomes of a session that has ended are kept, so that an interrupted run
can be continued. With ``--json FILE`` a row for every suite is written to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from device_suites import SUITES, Suite

DEVICE = "--cka-memory-device=emulate:cuda"
OWN = Path(__file__).parents[1]
WITHOUT_VALUES = "--cka-memory-device=emulate:cuda:a100,values=off"
OTHERS_CODE = re.compile(
    r"/(site-packages|_pytest|pluggy|pytest_cka_memory|emulated_cuda|unittest)/"
)

DEVICE_CHECK = re.compile(
    r"RuntimeError: (Expected all tensors to be on the same device|"
    r"expected self and mask to be on the same device|"
    r"indices should be either on cpu or on the same device)"
)
"""How PyTorch's own operators refuse tensors on two devices."""


@dataclass(frozen=True)
class Outcome:
    """How a test ended, and how many blocks it allocated on the device."""

    text: str
    blocks: int
    line: str = ""
    """The innermost line of the project, if the error was raised below Python."""

    @property
    def kind(self) -> str:
        """The word before the reason."""
        return self.text.partition(":")[0]


@dataclass(frozen=True)
class Comparison:
    """Tests in a session with the device, against a session on the CPU."""

    known: dict[str, tuple[Outcome, Outcome]]
    """The name of a test -> how it ended on the CPU and on the device."""
    refused: set[str]
    """Those that PyTorch's own check of devices refuses on the device."""
    repeated: int = 0
    """How many tests it refuses without values."""

    def row(self) -> dict[str, Any]:
        """Return the counts, and the causes of different outcomes."""
        different = [name for name, pair in self.known.items() if pair[0].kind != pair[1].kind]
        skipped = [
            name
            for name in different
            if [outcome.kind for outcome in self.known[name]] == ["skipped", "passed"]
        ]
        others = [name for name in different if name not in {*skipped, *self.refused}]
        ends = [outcome for _, outcome in self.known.values()]
        same = Counter(cpu.kind for cpu, cuda in self.known.values() if cpu.kind == cuda.kind)
        return {
            "ran": len(ends),
            "allocating": sum(1 for outcome in ends if outcome.blocks),
            "same": same.total(),
            "failed on both": same["failed"],
            "skipped on the CPU": len(skipped),
            "refused by PyTorch": len(self.refused),
            "refused without values": self.repeated,
            "other": len(others),
            "refused at": Counter(self.known[name][1].line for name in sorted(self.refused)),
            "reasons to skip": Counter(self.known[name][0].text for name in skipped),
            "others": [
                {"test": name, "cpu": cpu.text, "device": cuda.text, "line": cuda.line}
                for name in others
                for cpu, cuda in [self.known[name]]
            ],
        }


# ---- One session ----


class Recorder:
    """A pytest plugin that writes one line of JSON for every test as soon as it ended."""

    def __init__(self, out: Path) -> None:
        self._lines = out.open("a", encoding="utf-8")
        self._outcome = ""
        self._line: str | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count the blocks that the allocator of the device hands out until the test has ended."""
        before = blocks_allocated()
        self._outcome, self._line = "passed", None
        result = yield
        blocks = blocks_allocated() - before
        outcome = {"outcome": self._outcome, "blocks": blocks, "line": self._line or ""}
        print(json.dumps({"name": item.nodeid, **outcome}), file=self._lines, flush=True)
        return result

    def pytest_exception_interact(self, call: pytest.CallInfo[object]) -> None:
        """Note the line of the project below which the first error of a test was raised."""
        if call.excinfo is None or self._line is not None:
            return
        self._line = ""
        entries = [(e, str(e.statement).strip()) for e in call.excinfo.traceback]
        if entries[-1][1].startswith(("raise", "assert")):
            return
        of_project = [e for e in entries if not OTHERS_CODE.search(str(e[0].path))]
        if of_project:
            entry, statement = of_project[-1]
            path = os.path.relpath(entry.path)
            self._line = f"{path}:{entry.lineno + 1}: {' '.join(statement.split())}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note why a test did not pass; the first phase that says so counts."""
        if report.outcome != "passed" and self._outcome == "passed":
            entry = getattr(report.longrepr, "reprcrash", None)
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else entry
            self._outcome = f"{report.outcome}: {str(getattr(why, 'message', why))[:200]}"


def blocks_allocated() -> int:
    """Return how many blocks the CUDA allocator has handed out so far."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return sum(
        torch.cuda.memory_stats(index).get("allocation.all.allocated", 0)
        for index in range(torch.cuda.device_count())
    )


# ---- Both sessions ----


def outcomes(
    suite: Suite,
    folder: Path,
    device: str,
    limit: int,
    keep: Path | None,
    names: Sequence[str] = (),
) -> dict[str, Outcome]:
    """Return test -> outcome, for those that ended within `limit` seconds.

    Args:
        suite: the tests.
        folder: the clone.
        device: ``cpu``, ``cuda`` or ``without values``.
        limit: seconds.
        keep: where outcomes of earlier runs are, or None.
        names: of tests, in place of all of them.
    """
    if keep is not None:
        slug = re.sub(r"\W+", "-", f"{suite.name} {device}")
        kept = keep / f"{slug}.jsonl"
        if not kept.exists():
            partial = kept.with_suffix(".part")
            partial.unlink(missing_ok=True)
            run(suite, folder, device, limit, names, partial)
            partial.rename(kept)
        return outcomes_in(kept)
    with tempfile.TemporaryDirectory() as temporary:
        lines = Path(temporary) / "lines.jsonl"
        run(suite, folder, device, limit, names, lines)
        return outcomes_in(lines)


def run(
    suite: Suite, folder: Path, device: str, limit: int, names: Sequence[str], lines: Path
) -> None:
    """Run a session that writes its outcomes to a file."""
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += ["-W", "ignore", "-p", "no:randomly", *suite.options]
    if device == "cpu":
        options += suite.on_cpu
    else:
        options += [DEVICE if device == "cuda" else WITHOUT_VALUES, *suite.on_cuda]
    name = "cpu" if device == "cpu" else "cuda"
    environment = {key: value.format(device=name) for key, value in suite.environment.items()}
    paths = [str(folder / source) for source in suite.sources]
    paths.append(os.environ.get("PYTHONPATH", str(OWN)))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    # Not as arguments, because some tests start a session of their own for themselves.
    environment["PYTEST_ADDOPTS"] = shlex.join(options)
    if suite.copied:
        shutil.copy(Path(__file__).with_name(suite.copied), folder / "tests")
    lines.touch()
    with tempfile.TemporaryDirectory() as temporary:
        targets = Path(temporary) / "targets.txt"
        targets.write_text("\n".join(names or suite.targets), encoding="utf-8")
        try:
            subprocess.run(
                [sys.executable, __file__, "--session", str(lines), f"@{targets}"],
                cwd=folder,
                env={**os.environ, **environment},
                check=False,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            print(f"  {suite.name}: stopped on {device} after {limit} s", file=sys.stderr)


def outcomes_in(lines: Path) -> dict[str, Outcome]:
    """Return the outcomes that a session has written."""
    found = {}
    for line in lines.read_text(encoding="utf-8").splitlines():
        test = json.loads(line)
        found[test["name"]] = Outcome(test["outcome"], test["blocks"], test["line"])
    return found


def pairs(
    on_cpu: dict[str, Outcome], on_cuda: dict[str, Outcome]
) -> dict[str, tuple[Outcome, Outcome]]:
    """Return the two outcomes of each test that both sessions have and that ran on the device.

    The name of a test has the device if the test is parametrized. Other tests have ``cuda`` in
    their own name, in both sessions.
    """
    by_name = {name.replace("cpu", "DEVICE"): found for name, found in on_cpu.items()} | on_cpu
    known = {}
    for name, found in on_cuda.items():
        cpu = by_name.get(name) or by_name.get(re.sub(r"cuda(:0)?", "DEVICE", name))
        if cpu and found.kind != "skipped":
            known[name] = (cpu, found)
    return known


def compared(suite: Suite, folder: Path, limit: int, keep: Path | None) -> Comparison:
    """Return how many tests ran on the device, and those whose outcome differs."""
    on_cuda = outcomes(suite, folder, "cuda", limit, keep)
    if suite.both_at_once:
        on_cpu = {name: found for name, found in on_cuda.items() if "cuda" not in name}
        on_cuda = {name: found for name, found in on_cuda.items() if "cuda" in name}
    else:
        on_cpu = outcomes(suite, folder, "cpu", limit, keep)
    known = pairs(on_cpu, on_cuda)
    different = {name: pair for name, pair in known.items() if pair[0].kind != pair[1].kind}
    suspects = [name for name, (_, found) in different.items() if DEVICE_CHECK.search(found.text)]
    if not suspects:
        return Comparison(known, set())
    again = outcomes(suite, folder, "without values", limit, keep, suspects)
    repeated = [found for found in again.values() if DEVICE_CHECK.search(found.text)]
    lines = {found.line for found in repeated if found.line}
    refused = {name for name in suspects if known[name][1].line in lines}
    return Comparison(known, refused, len(repeated))


def version_of(folder: Path) -> str:
    """Return the commit of a clone, or the version in the name of a source distribution."""
    if not (folder / ".git").exists():
        return folder.name.rpartition("-")[2]
    command = ["git", "-C", str(folder), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def explain(row: dict[str, Any]) -> None:
    """Print the tests with another outcome, those that PyTorch refuses by line of the project."""
    for line, count in row["refused at"].most_common():
        print(f"  PyTorch refuses {count}: {line}", file=sys.stderr)
    for test in row["others"]:
        print(
            f"  {test['test']}: {test['cpu']!r} -> {test['device']!r} {test['line']}",
            file=sys.stderr,
        )
    sys.stderr.flush()


def main() -> int:
    if sys.argv[1:2] == ["--session"]:
        return pytest.main(sys.argv[3:], plugins=[Recorder(Path(sys.argv[2]))])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=int, default=900, help="seconds for each run")
    parser.add_argument("--keep", type=Path, help="a folder for outcomes")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    options = parser.parse_args()
    keep = options.keep and options.keep.absolute()
    rows = []
    for suite in SUITES:
        if options.names and not {suite.folder, suite.name} & {*options.names}:
            continue
        folder = options.folder.absolute() / suite.folder
        row = compared(suite, folder, options.limit, keep).row()
        print(suite.name, {key: count for key, count in row.items() if isinstance(count, int)})
        explain(row)
        rows.append({"suite": suite.name, "version": version_of(folder), **row})
    if options.json:
        import torch

        found = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        text = json.dumps({**found, "limit_seconds": options.limit, "suites": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
