"""Run PyTorch's own tests of distributed training on emulated devices, outcome by outcome.

python benchmarks/torch_distributed.py [--nccl2] [--tests PATTERN] [--json results.json]

The tests are those of the installed version, in ``torch.testing._internal.distributed``: the
collectives of a process group, DDP, and what is built on them, for the backend ``nccl``. Each runs
as it is, in two ranks that are forked for it; those that skip because they need more run again in
four, and then in eight. No GPU is needed. With ``--nccl2`` the group is the one that torch 2.15
uses by default. A test may take ``--seconds``, because ranks on a CPU are slower than on cards.
Three tests also train a ResNet-50 on pictures of a million pixels if torchvision is installed,
which takes 4 GB for each rank and very long; they see it with ``--torchvision`` alone. Exits with 1
if a test fails.
"""

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

RANKS = (2, 4, 8)
_NEEDS_MORE = re.compile(r"world size( of 4)?\.?$|at least 4 accelerator devices$")
"""The end of what tests say that need more than two ranks."""
_LONGEST = 300
"""Characters that are kept of what a test printed: the end, where the error is."""


class Outcomes(unittest.TextTestResult):
    """Writes one line of JSON for each test as soon as it has ended."""

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        """Take the time."""
        super().startTest(test)
        self._started = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        """Write how the test has ended."""
        super().stopTest(test)
        found = {"test": test.id().rpartition(".")[2], "outcome": "passed", "why": ""}
        for outcome, those in (
            ("skipped", self.skipped),
            ("failed", self.failures),
            ("failed", self.errors),
        ):
            if those and those[-1][0] is test:
                why = those[-1][1].partition("To execute this test")[0].strip()
                found |= {"outcome": outcome, "why": why[-_LONGEST:]}
        found["seconds"] = str(round(time.monotonic() - self._started, 1))
        with Path(os.environ["OUTCOMES"]).open("a", encoding="utf-8") as lines:
            print(json.dumps(found), file=lines)


def run_here(patterns: list[str], *, torchvision: bool) -> None:
    """Run the tests in this process, whose devices are emulated."""
    import torch

    if not torchvision:
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # importing it raises

    # These two initialise CUDA while the tests are imported, and then no rank could be forked.
    with (
        patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        patch("torch.utils._triton.has_triton", lambda *_: False),
    ):
        import torch.testing._internal.common_device_type
        from torch.testing._internal import common_distributed
        from torch.testing._internal.distributed import distributed_test
    common_distributed.TIMEOUT_OVERRIDE.clear()  # some are shorter than what --seconds allows
    if torch.cuda.is_initialized():
        sys.exit("this version of PyTorch initialises CUDA when its tests are imported")
    torch.backends.cuda.matmul.allow_tf32 = False

    tests = distributed_test.DistributedTest._DistTestBase

    class OnTwoRanks(distributed_test.TestDistBackend, tests):
        """PyTorch's tests, each with ranks that are forked for it."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    names = unittest.TestLoader().getTestCaseNames(OnTwoRanks)
    chosen = [name for name in names if any(fnmatch.fnmatch(name, p) for p in patterns)]
    suite = unittest.TestSuite(OnTwoRanks(name) for name in chosen)
    unittest.TextTestRunner(resultclass=Outcomes, verbosity=0).run(suite)


def outcomes(patterns: list[str], ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the outcome of each test, of a new process that has the emulated devices."""
    more = ["--torchvision"] if options.torchvision else []
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "outcomes.jsonl"
        lines.touch()
        given = {
            "BACKEND": "nccl",
            "WORLD_SIZE": str(ranks),
            "TEMP_DIR": folder,
            "OUTCOMES": str(lines),
            "OMP_NUM_THREADS": "1",
            "TORCH_DIST_USE_NCCL2": str(int(options.nccl2)),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(options.seconds),
            # Otherwise `torch.cuda.is_available` initialises CUDA, and no rank could be forked.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        emulated = ["-m", "emulated_cuda", "--devices", str(ranks)]
        try:
            subprocess.run(
                [sys.executable, *emulated, __file__, "--here", *more, "--tests", *patterns],
                env={**os.environ, **given},
                check=False,
                timeout=options.limit,
            )
        except subprocess.TimeoutExpired:
            print(f"stopped after {options.limit} s", file=sys.stderr)
        found = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
        return [{**row, "ranks": ranks} for row in found]


def outcomes_of_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one outcome of each test: that with the first number of ranks that is enough."""
    rows: dict[str, dict[str, Any]] = {}
    patterns = options.tests
    for ranks in RANKS:
        found = outcomes(patterns, ranks, options)
        rows |= {row["test"]: row for row in found}
        patterns = [row["test"] for row in found if _NEEDS_MORE.search(row["why"])]
        if not patterns:
            break
    return [rows[name] for name in sorted(rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--limit", type=int, default=3600, help="seconds for all")
    parser.add_argument("--seconds", type=int, default=300, help="for one test")
    parser.add_argument("--nccl2", action="store_true", help="with ProcessGroupNCCL2")
    parser.add_argument("--torchvision", action="store_true", help="let the tests import it")
    parser.add_argument("--json", type=Path, help="where the outcomes are written")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_here(options.tests, torchvision=options.torchvision)
        return 0
    found = outcomes_of_all(options)
    print(dict(Counter(row["outcome"] for row in found)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    failed = [row for row in found if row["outcome"] == "failed"]
    for row in failed:
        print(f"{row['test']}: {row['why']}")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
