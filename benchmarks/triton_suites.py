"""Run other projects' tests of Triton kernels on the emulated device, and say how each ended.

python benchmarks/triton_suites.py FOLDER [--suites NAME ...] [--keep FOLDER] [--json FILE]

FOLDER has a checkout of each project under the name in ``SUITES``, and what their tests import can
be imported. Each suite runs a sample of its tests: all are collected, and as many as its row says
are drawn with a fixed seed. A test that needs more than ``--seconds`` of processor time, or more
memory on the device than ``--gigabytes``, does not count, nor one that its project skips. With
``--keep`` the outcomes of an interrupted run are kept, and tests with an outcome do not run again.
No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CARD = "h100"
SEED = 32
OWN = Path(__file__).parents[1]
_LONGEST = 400
"""Characters that are kept of an error."""


@dataclass(frozen=True)
class Suite:
    """Tests of a project.

    Attributes:
        name: also of the folder.
        targets: what pytest gets, relative to the folder.
        sample: how many tests run.
        sources: folders of the project from which its tests import.
        options: of pytest.
        without: words in the names of tests that are not collected.
        only: words of which the names of tests that are collected have one.
        bare: packages whose ``__init__`` is left out, because it imports an extension of CUDA.
        commit: of the project, that was run last; ``{torch}`` is the version that is installed.
        libraries: with which it was run last, beside torch and Triton.
    """

    name: str
    targets: tuple[str, ...]
    sample: int
    sources: tuple[str, ...] = (".",)
    options: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    only: tuple[str, ...] = ("",)
    bare: tuple[str, ...] = ()
    commit: str = ""
    libraries: tuple[str, ...] = ()

    def has(self, test: str) -> bool:
        """Return whether a test belongs to the sample's population."""
        left_out = any(word in test for word in self.without)
        return not left_out and any(word in test for word in self.only)


SUITES = (
    Suite(
        *("Liger-Kernel", ("test/transformers",), 50, ("src", ".")),
        without=("cute", "cutile"),
        commit="ead96b6",
        libraries=("transformers 4.57.3",),
    ),
    Suite("flash-linear-attention", ("tests/ops", "tests/modules"), 40, commit="bc3b101"),
    Suite("kernels", ("test",), 24, commit="eeeebdd"),
    Suite("mamba", ("tests/ops/triton",), 30, bare=("mamba_ssm",), commit="e9594ce"),
    Suite(
        "ao",
        (
            "test/prototype/mx_formats/test_kernels.py",
            "test/prototype/blockwise_fp8_training",
            "test/prototype/moe_training/test_kernels.py",
        ),
        30,
    ),
    Suite("unsloth", ("unsloth/kernels/moe/tests/test_grouped_gemm.py",), 16),
    Suite(
        *("triton", ("python/test/unit/language/test_core.py",), 1000, ("python/test/unit",)),
        commit="f4fca2c",
    ),
    Suite(
        *("pytorch", ("inductor/test_torchinductor.py",), 300, (".", "inductor")),
        options=("--noconftest", "-c", os.devnull, "--rootdir", "."),
        only=("::GPUTests::", "::TritonCodeGenTests::"),
        commit="v{torch}",
    ),
)


# ---- One session ----


class Recorder:
    """A pytest plugin that writes a line of JSON before and after each test.

    Args:
        lines: the file.
        seconds: after which a test is stopped.
        suite: which tests it leaves out.
    """

    def __init__(self, lines: Path, seconds: int, suite: Suite) -> None:
        self._lines = lines.open("a", encoding="utf-8")
        self._seconds = seconds
        self._suite = suite
        self._found = {"outcome": "passed", "why": ""}

    def _write(self, **row: Any) -> None:
        print(json.dumps(row), file=self._lines, flush=True)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Leave out tests, and write the names of those that were collected."""
        items[:] = [item for item in items if self._suite.has(item.nodeid)]
        if config.option.collectonly:
            self._write(collected=[item.nodeid for item in items])

    @pytest.fixture
    def device(self) -> str:
        """Return where tests run that do not have a fixture for it; a conftest replaces this."""
        return "cuda"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Stop the test after some time, and write how it ended."""
        self._write(test=item.nodeid)
        self._found = {"outcome": "passed", "why": ""}
        signal.signal(signal.SIGPROF, _stop)
        signal.setitimer(signal.ITIMER_PROF, self._seconds, 20)  # again, if something catches it
        begun = time.process_time()
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            seconds = round(time.process_time() - begun, 1)
            self._write(test=item.nodeid, **self._found, seconds=seconds)
            if self._found["outcome"] in ("too large", "too long"):
                item.session.shouldstop = "its memory may still be held"  # a new process goes on

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note why a test did not pass; the first phase that says so counts."""
        if report.outcome == "passed" or self._found["outcome"] != "passed":
            return
        entry = getattr(report.longrepr, "reprcrash", None)
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else entry
        text = str(getattr(why, "message", why or report.longrepr))
        outcome = report.outcome
        if "TookTooLong" in text:
            outcome = "too long"
        elif "OutOfMemoryError" in report.longreprtext:  # torch's comparisons raise another from it
            outcome = "too large"
        text = re.sub(r"(/[\w.+-]+)+/(?=[\w.+-]+)", "", text)  # folders of this machine
        self._found = {"outcome": outcome, "why": text[:_LONGEST]}


class TookTooLong(BaseException):
    """A test has used its time."""


def _stop(*args: object) -> None:
    raise TookTooLong


def run_here(suite: Suite, lines: Path, targets: list[str], options: argparse.Namespace) -> int:
    """Run tests in this process, whose device is emulated."""
    import types

    import emulated_cuda

    emulated_cuda.load(CARD)
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.gigabytes * 2**30 / total))
    for name in suite.bare:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(source) / name) for source in suite.sources]
        sys.modules[name] = package
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore"]
    arguments += ["-p", "no:cka_memory", "-p", "no:rerunfailures"]  # the first outcome counts
    arguments += ["--continue-on-collection-errors", *suite.options]
    if options.collect:
        arguments.append("--collect-only")
    recorder = Recorder(lines, options.seconds, suite)
    return int(pytest.main([*arguments, *targets], plugins=[recorder]))


# ---- All sessions of a suite ----


def outcomes(suite: Suite, options: argparse.Namespace, keep: Path) -> list[dict[str, Any]]:
    """Return the outcome of each test of a suite's sample."""
    collected = keep / f"{suite.name}.collected.jsonl"
    if not rows_of(collected):
        session(suite, options, collected, list(suite.targets), collect=True)
    names = rows_of(collected)[-1]["collected"]
    # A shorter run is a sample too, and a longer one goes on with it.
    sample = random.Random(SEED).sample(sorted(names), len(names))[: options.count or suite.sample]
    lines = keep / f"{suite.name}.jsonl"
    while True:
        found = {row["test"]: row for row in rows_of(lines) if "outcome" in row}
        begun = [row["test"] for row in rows_of(lines)]
        if begun and begun[-1] not in found:
            crashed = {"test": begun[-1], "outcome": "failed", "why": "the process ended"}
            with lines.open("a", encoding="utf-8") as file:
                print(json.dumps({**crashed, "seconds": 0}), file=file)
            continue
        left = [name for name in sample if name not in found]
        if not left:
            return [{"of": len(names), **found[name]} for name in sample]
        session(suite, options, lines, left[: options.at_once])
        if len(rows_of(lines)) == len(begun):
            raise SystemExit(f"{suite.name}: no test of {left[:3]} ran")


def session(
    suite: Suite, options: argparse.Namespace, lines: Path, names: list[str], collect: bool = False
) -> None:
    """Run tests in a process of their own, which writes lines."""
    folder = options.folder.absolute() / suite.name
    paths = [*(str(folder / source) for source in suite.sources), str(OWN)]
    environment = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as temporary:
        targets = Path(temporary) / "targets.json"
        targets.write_text(json.dumps(names), encoding="utf-8")
        limits = ["--seconds", str(options.seconds), "--gigabytes", str(options.gigabytes)]
        command = [sys.executable, __file__, str(folder), "--here", str(lines.absolute())]
        command += ["--suites", suite.name, "--targets", str(targets), *limits]
        command += ["--collect"] * collect
        subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment, "HF_HUB_OFFLINE": "1"},
            check=False,
            stdout=None if options.verbose else subprocess.DEVNULL,
            stderr=None if options.verbose else subprocess.DEVNULL,
        )


def rows_of(lines: Path) -> list[dict[str, Any]]:
    """Return what sessions have written."""
    return [json.loads(x) for x in lines.read_text("utf-8").splitlines()] if lines.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    names = [suite.name for suite in SUITES]
    parser.add_argument("--suites", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--count", type=int, help="how many tests of each suite")
    parser.add_argument("--seconds", type=int, default=90, help="of processor time, for each test")
    parser.add_argument("--gigabytes", type=float, default=4, help="of the device's memory")
    parser.add_argument("--at-once", type=int, default=50, help="tests for each process")
    parser.add_argument("--keep", type=Path, help="a folder for outcomes")
    parser.add_argument("--json", type=Path, help="where the outcomes are written")
    parser.add_argument("--verbose", action="store_true", help="show what the sessions print")
    for hidden in ("--here", "--targets"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [suite for suite in SUITES if suite.name in options.suites]
    if options.here:
        return run_here(chosen[0], options.here, json.loads(options.targets.read_text()), options)
    with tempfile.TemporaryDirectory() as temporary:
        keep = options.keep or Path(temporary)
        keep.mkdir(parents=True, exist_ok=True)
        found = {suite.name: outcomes(suite, options, keep) for suite in chosen}
    for name, rows in found.items():
        print(name, dict(Counter(row["outcome"] for row in rows)))
        for row in rows:
            if row["outcome"] == "failed":
                print(f"  {row['test']}: {row['why']}")
    if options.json:
        write(options.json, found)
    return 0


def write(path: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    """Write the outcomes; those of suites that did not run now stay as they are."""
    import torch
    import triton

    kept = json.loads(path.read_text("utf-8"))["suites"] if path.exists() else {}
    data = {"torch": torch.__version__, "triton": triton.__version__, "card": CARD, "seed": SEED}
    data["date"] = time.strftime("%Y-%m-%d")
    data["suites"] = {**kept, **found}
    release = torch.__version__.partition("+")[0]
    data["commits"] = {
        suite.name: suite.commit.format(torch=release)
        for suite in SUITES
        if suite.name in data["suites"]
    }
    data["libraries"] = {
        suite.name: suite.libraries
        for suite in SUITES
        if suite.libraries and suite.name in data["suites"]
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
