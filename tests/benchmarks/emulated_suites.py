"""Run the test suites of other projects on the emulated device and on the CPU, and compare.

``python tests/benchmarks/emulated_suites.py FOLDER [NAME ...]`` expects a clone of each project in
FOLDER, under the name of its repository, and what its tests import. It prints one row for every
suite: tests run in a session with the device, how many of them allocated memory on it, how many of
those have the same outcome as on the CPU, and the others.

A suite has a switch for the device, or parametrizes its tests over the devices that there are; then
the two forms of a test are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DEVICE = "--cka-memory-device=emulate:cuda"


@dataclass(frozen=True)
class Suite:
    """Tests of a project, and how they are told the device."""

    folder: str
    targets: tuple[str, ...]
    on_cpu: tuple[str, ...] = ()
    on_cuda: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Of pytest, on both devices."""
    environment: dict[str, str] = field(default_factory=dict)
    """``{device}`` in a value is replaced."""
    source: str = "."
    """The folder that has the package."""
    both_at_once: bool = False
    """Whether tests are parametrized over devices."""
    part: str = ""
    """What the targets are about."""

    @property
    def name(self) -> str:
        """The name of the repository, and the part of its tests."""
        return f"{self.folder}: {self.part}" if self.part else self.folder


@dataclass(frozen=True)
class Outcome:
    """How a test ended, and how many blocks it allocated on the device."""

    text: str
    blocks: int

    @property
    def kind(self) -> str:
        """The word before the reason."""
        return self.text.partition(":")[0]


@dataclass(frozen=True)
class Comparison:
    """Tests in a session with the device, against a session on the CPU."""

    ran: int
    allocating: int
    different: dict[str, tuple[str, str]]


KORNIA = (
    ("colour, losses, morphology, metrics", ("color", "losses", "morphology", "metrics")),
    ("filters", ("filters",)),
    ("enhancement", ("enhance",)),
    ("geometry", ("geometry",)),
    ("augmentation", ("augmentation",)),
    ("features, sensors, others", ("feature", "sensors", "contrib", "core", "image", "utils")),
)

SUITES = (
    *(
        Suite(
            "kornia",
            tuple(f"tests/{folder}" for folder in folders),
            ("--device=cpu", "--dtype=float32"),
            ("--device=cuda", "--dtype=float32"),
            part=part,
        )
        for part, folders in KORNIA
    ),
    Suite(
        "pytorch-metric-learning",
        ("tests/distances", "tests/reducers", "tests/regularizers", "tests/miners"),
        environment={"TEST_DEVICE": "{device}", "TEST_DTYPES": "float32"},
        source="src",
    ),
    Suite("piq", ("tests",), both_at_once=True),
    Suite(
        "pytorch-image-models",
        ("tests/test_layers.py",),
        environment={"TORCH_DEVICE": "{device}"},
    ),
    Suite(
        "pytorch_geometric",
        ("test/utils", "test/nn/aggr", "test/nn/norm", "test/nn/dense", "test/nn/pool"),
        both_at_once=True,
    ),
    Suite("linear_operator", ("test/operators", "test/utils", "test/functions")),
    Suite("gpytorch", ("test/likelihoods", "test/means", "test/distributions")),
    Suite(
        "accelerate", ("tests/test_optimizer.py", "tests/test_scheduler.py", "tests/test_utils.py")
    ),
)


# ---- One session ----


class Recorder:
    """A pytest plugin that writes one line of JSON for every test as soon as it ended."""

    def __init__(self, out: Path) -> None:
        self._lines = out.open("a", encoding="utf-8")
        self._outcome = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count the blocks that the allocator of the device hands out until the test has ended."""
        before = blocks_allocated()
        self._outcome = "passed"
        result = yield
        blocks = blocks_allocated() - before
        line = {"name": item.nodeid, "outcome": self._outcome, "blocks": blocks}
        print(json.dumps(line), file=self._lines, flush=True)
        return result

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


def outcomes(suite: Suite, folder: Path, device: str, limit: int) -> dict[str, Outcome]:
    """Return test -> outcome, for those that ended within `limit` seconds."""
    options = [*suite.targets, "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += ["-W", "ignore", "-p", "no:randomly", *suite.options]
    if device == "cuda":
        options += [DEVICE, *suite.on_cuda]
    else:
        options += suite.on_cpu
    environment = {name: value.format(device=device) for name, value in suite.environment.items()}
    own = str(Path(__file__).parents[2])
    paths = (str(folder / suite.source), os.environ.get("PYTHONPATH", own))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory() as temporary:
        lines = Path(temporary) / "lines.jsonl"
        lines.touch()
        try:
            subprocess.run(
                [sys.executable, __file__, "--session", str(lines), *options],
                cwd=folder,
                env={**os.environ, **environment},
                check=False,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            print(f"  {suite.name}: stopped on {device} after {limit} s", file=sys.stderr)
        return outcomes_in(lines)


def outcomes_in(lines: Path) -> dict[str, Outcome]:
    """Return the outcomes that a session has written."""
    found = {}
    for line in lines.read_text(encoding="utf-8").splitlines():
        test = json.loads(line)
        found[test["name"]] = Outcome(test["outcome"], test["blocks"])
    return found


def compared(suite: Suite, folder: Path, limit: int) -> Comparison:
    """Return how many tests ran on the device, and those whose outcome differs."""
    on_cuda = outcomes(suite, folder, "cuda", limit)
    if suite.both_at_once:
        on_cpu = {name.replace("cpu", "DEVICE"): found for name, found in on_cuda.items()}
        on_cuda = {name: found for name, found in on_cuda.items() if "cuda" in name}
    else:
        on_cpu = outcomes(suite, folder, "cpu", limit)
        on_cpu = {name.replace("cpu", "DEVICE"): found for name, found in on_cpu.items()}
    on_cuda = {re.sub(r"cuda(:0)?", "DEVICE", name): found for name, found in on_cuda.items()}
    known = {
        name: found
        for name, found in on_cuda.items()
        if name in on_cpu and not found.text.startswith("skipped")
    }
    different = {
        name: (on_cpu[name].text, found.text)
        for name, found in known.items()
        if found.kind != on_cpu[name].kind
    }
    allocating = sum(1 for found in known.values() if found.blocks)
    return Comparison(len(known), allocating, different)


def main() -> int:
    if sys.argv[1:2] == ["--session"]:
        return pytest.main(sys.argv[3:], plugins=[Recorder(Path(sys.argv[2]))])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=int, default=900, help="seconds for each run")
    options = parser.parse_args()
    print("| suite | tests run | on the device | same outcome | other outcome |")
    print("| --- | --- | --- | --- | --- |")
    for suite in SUITES:
        if options.names and not {suite.folder, suite.name} & {*options.names}:
            continue
        found = compared(suite, options.folder / suite.folder, options.limit)
        same = found.ran - len(found.different)
        numbers = (found.ran, found.allocating, same, len(found.different))
        print(f"| {suite.name} | {' | '.join(map(str, numbers))} |", flush=True)
        for name, (cpu, cuda) in found.different.items():
            print(f"  {name}: {cpu!r} -> {cuda!r}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
