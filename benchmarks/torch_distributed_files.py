"""Run test files of PyTorch's repository on several emulated devices, outcome by outcome.

python benchmarks/torch_distributed_files.py FOLDER [FILE ...] [--keep FILE] [--json FILE]

FOLDER is ``test/distributed`` of a checkout of the release that is installed, and FILE a file in
it; without one, those in ``FILES``. A file runs as it is, with two devices, and its tests that skip
because they need more run again with four, and then with eight; those in ``AT_FIRST`` begin with
more. Ranks that a test spawns are forked from a process that has imported torch, with the
environment of the test, because the import takes longer than most tests. The flight recorder names
functions of C++ by ``TORCH_SYMBOLIZE_MODE=dladdr``, because ``addr2line`` takes half a minute for
each process. A test may take ``--seconds``. With ``--keep`` the outcomes of an interrupted run are
kept, and tests with an outcome do not run again. ``expecttest`` must be installed. No GPU is
needed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

CARD = "h100"
OWN = Path(__file__).parents[1]
RANKS = (2, 4, 8)
FILES = (
    *("_composable/fsdp/test_fully_shard_*.py", "_tools/test_fsdp2_mem_tracker.py"),
    *("test_c10d_spawn_nccl.py", "test_data_parallel.py", "test_c10d_ops_nccl.py"),
    *("pipelining/test_stage.py", "pipelining/test_schedule_multiproc.py"),
    *("tensor/parallel/test_*.py", "test_c10d_nccl.py", "test_device_mesh.py"),
)
LEFT_OUT = {
    "SymmMem": "needs symmetric memory, which the emulated NCCL refuses by name",
    "training_memory_no_gc": "needs 4 GB of this machine's memory for each rank",
    "CommTest::test_unwaited": "sends 200 GB",
    "PerParamMeshOverlap": "measures that streams overlap, for more than 90 s",
}
"""Words in names of tests that do not run, because they would compute for a long time."""
NEEDS_MORE = re.compile(
    r"(?i)needs? (?:at least|>=) ?\d|at least \d+ (?:GPU|device|CUDA|accelerator)|world.?size|"
    r"not enough (?:GPU|device)|requires? \d+ (?:GPU|device|rank)"
)
"""What tests say that need more devices."""
AT_FIRST = {"test_device_mesh.py": 8}
"""With how many devices a file runs at first; with fewer its tests use the CPU instead."""
ENDED_WELL = ("passed", "skipped", "left out")
_LONGEST = 600
"""Characters that are kept of an error: its end, where the error of the rank is."""
Row = dict[str, Any]


# ---- One session ----


class Rank(ForkServerProcess):
    """A process that is forked from a server, with the environment of a spawned one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        """Do the work of the rank."""
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class Recorder:
    """A pytest plugin that writes a line of JSON before and after each test.

    Args:
        lines: the file.
        file: of the tests, relative to PyTorch's folder.
        wanted: names of the tests that run; all of the file if it is None.
        done: names of tests that have an outcome.
    """

    def __init__(self, lines: Path, file: str, wanted: list[str] | None, done: list[str]) -> None:
        self._lines = lines.open("a", encoding="utf-8")
        self._file = file
        self._wanted = wanted
        self._done = done
        self._found = {"outcome": "passed", "why": ""}

    def _write(self, **row: Any) -> None:
        print(json.dumps({"file": self._file, **row}), file=self._lines, flush=True)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out tests that have run, or that are not wanted."""
        if self._wanted is not None:
            items[:] = [item for item in items if _name(item.nodeid) in self._wanted]
        self._write(collected=[_name(item.nodeid) for item in items])
        items[:] = [item for item in items if _name(item.nodeid) not in self._done]
        for item in list(items):
            why = next((why for word, why in LEFT_OUT.items() if word in item.nodeid), None)
            if why:
                self._write(test=_name(item.nodeid), outcome="left out", why=why, seconds=0)
                items.remove(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Write which test begins, and how it ended."""
        if getattr(item.cls, "poison_pill", False):  # it would skip, because one before has failed
            item.session.shouldstop = "a new process goes on"
            return (yield)
        self._write(test=_name(item.nodeid))
        self._found = {"outcome": "passed", "why": ""}
        begun = time.monotonic()
        try:
            return (yield)
        finally:
            seconds = round(time.monotonic() - begun, 1)
            self._write(test=_name(item.nodeid), **self._found, seconds=seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note why a test did not pass; the first phase that says so counts."""
        if report.outcome == "passed" or self._found["outcome"] != "passed":
            return
        entry = getattr(report.longrepr, "reprcrash", None)
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else entry
        text = str(getattr(why, "message", why or report.longrepr))
        self._found = {"outcome": str(report.outcome), "why": _reason(text)}


def _name(node: str) -> str:
    """Return the class and name of a test."""
    return node.partition("::")[2]


def _reason(text: str) -> str:
    """Return the end of what a test printed, without folders of this machine."""
    text = re.split(r"\n+To execute this test", text)[0].strip()
    text = re.sub(r"(/[\w.+-]+)+/(?=[\w.+-]+)", "", text)
    return text[-_LONGEST:]


def run_here(folder: Path, lines: Path, targets: Row) -> int:
    """Run the tests of a file in this process, whose devices are emulated."""
    import torch_distributed_imports  # noqa: F401 - for this process, as for the ranks
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch_distributed_imports"])
    multiprocessing.set_start_method("spawn")  # of the other classes of PyTorch's tests
    MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(Rank)
    # Classes such as NCCLTraceTest ask for the context by name.
    multiprocessing.get_context("spawn").Process = Rank
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore"]
    arguments += [
        "-p",
        "no:cka_memory",
        "-p",
        "no:rerunfailures",
        "-p",
        "no:timeout",
        "--noconftest",
    ]  # conftest.py is for pytest 7
    recorder = Recorder(lines, **targets)
    return int(pytest.main([*arguments, str(folder / targets["file"])], plugins=[recorder]))


# ---- All sessions of a file ----


def run_file(
    file: str, ranks: int, wanted: list[str] | None, options: argparse.Namespace
) -> list[Row]:
    """Return an outcome of each test of a file, with so many devices."""
    while True:
        known = [row for row in rows_of(options.keep, ranks) if row["file"] == file]
        found = {row["test"]: row for row in known if "outcome" in row}
        begun = [row["test"] for row in known if "test" in row]
        if begun and begun[-1] not in found:
            _append(options.keep, file=file, ranks=ranks, test=begun[-1], **_ended("failed"))
            continue
        names = next((row["collected"] for row in known if "collected" in row), None)
        expected = wanted if wanted is not None else names
        if expected is not None and all(name in found for name in expected):
            return [found[name] for name in expected]
        session(file, ranks, {"wanted": wanted, "done": list(found)}, options)
        now = [row for row in rows_of(options.keep, ranks) if row["file"] == file]
        if not any("test" in row for row in now[len(known) :]) and (names is not None or now == []):
            return [{"file": file, "test": "", "ranks": ranks, **_ended("not collected")}]


def _ended(outcome: str) -> Row:
    return {"outcome": outcome, "why": "the process ended", "seconds": 0}


def session(file: str, ranks: int, targets: Row, options: argparse.Namespace) -> None:
    """Run tests in processes of their own, which write lines; end them if one takes too long."""
    with tempfile.TemporaryDirectory() as temporary:
        written = Path(temporary) / "targets.json"
        written.write_text(json.dumps({"file": file, **targets}), encoding="utf-8")
        lines = Path(temporary) / "lines.jsonl"
        lines.touch()
        folder = options.folder.absolute()
        paths = [str((folder / file).parent), str(folder), str(OWN), str(Path(__file__).parent)]
        given = {
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(options.temporary),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(options.seconds),
            "TORCH_SYMBOLIZE_MODE": "dladdr",
            # Otherwise `torch.cuda.is_available` initialises CUDA, and no rank could be forked.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        emulated = ["-m", "emulated_cuda", "--card", CARD, "--devices", str(ranks)]
        command = [sys.executable, *emulated, __file__, str(folder), "--here", str(lines)]
        command += ["--targets", str(written)]
        with subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **given},
            start_new_session=True,
            stdout=None if options.verbose else subprocess.DEVNULL,
            stderr=None if options.verbose else subprocess.DEVNULL,
        ) as process:
            _watch(process, lines, ranks, options)


def _watch(
    process: subprocess.Popen[bytes], lines: Path, ranks: int, options: argparse.Namespace
) -> None:
    """Copy the lines of a session until it has ended, or a test takes too long."""
    copied = 0
    since = time.monotonic()
    running: Row = {}
    while True:
        ended = process.poll() is not None
        for row in [json.loads(x) for x in lines.read_text("utf-8").splitlines()[copied:]]:
            copied += 1
            running, since = row, time.monotonic()
            _append(options.keep, ranks=ranks, **row)
        if ended or time.monotonic() - since > options.seconds:
            if not ended and "test" in running and "outcome" not in running:
                why = f"after {options.seconds} s"
                late = {"outcome": "too long", "why": why, "seconds": options.seconds}
                _append(options.keep, **{**running, "ranks": ranks, **late})
            with suppress(ProcessLookupError):  # ranks, and the server that forks them
                os.killpg(process.pid, signal.SIGKILL)
            return
        time.sleep(0.3)


def _append(path: Path, **row: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps(row), file=file)


def rows_of(lines: Path, ranks: int) -> list[Row]:
    """Return what sessions with so many devices have written."""
    if not lines.exists():
        return []
    rows = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    return [row for row in rows if row["ranks"] == ranks]


def outcomes(file: str, options: argparse.Namespace) -> list[Row]:
    """Return one outcome of each test: that with the first number of devices that is enough."""
    rows: dict[str, Row] = {}
    wanted: list[str] | None = None
    for ranks in [ranks for ranks in RANKS if ranks >= AT_FIRST.get(file, min(RANKS))]:
        found = run_file(file, ranks, wanted, options)
        rows |= {row["test"]: row for row in found}
        wanted = [
            row["test"]
            for row in found
            if row["outcome"] == "skipped" and NEEDS_MORE.search(row["why"])
        ]
        if not wanted:
            break
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help="relative to the folder", default=FILES)
    parser.add_argument("--seconds", type=int, default=300, help="for each test")
    parser.add_argument("--keep", type=Path, help="a file for outcomes")
    parser.add_argument("--json", type=Path, help="where the outcomes are written")
    parser.add_argument("--verbose", action="store_true", help="show what the sessions print")
    for hidden in ("--here", "--targets"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return run_here(options.folder, options.here, json.loads(options.targets.read_text()))
    with tempfile.TemporaryDirectory() as temporary:
        options.temporary = Path(temporary)
        options.keep = options.keep or options.temporary / "outcomes.jsonl"
        found = []
        for pattern in options.files:
            for path in sorted(options.folder.glob(pattern)):
                rows = outcomes(str(path.relative_to(options.folder)), options)
                print(path.name, dict(Counter(row["outcome"] for row in rows)), flush=True)
                for row in rows:
                    if row["outcome"] not in ENDED_WELL:
                        print(f"  {row['test']}, {row['outcome']}: {row['why']}", flush=True)
                found += rows
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["outcome"] in ENDED_WELL for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
