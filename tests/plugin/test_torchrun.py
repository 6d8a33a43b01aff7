"""Under torchrun all ranks share one report, and a failure on one rank fails every rank."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_processes
import pytest

STATUS = """
import os
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    yield
    with open(f"status-{os.environ['RANK']}", "w") as file:
        file.write(str(int(session.exitstatus)))
"""
TESTS = """
import os
import time
from datetime import timedelta
import pytest
import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
KEPT = []

@pytest.mark.max_retained_mb(0)
def test_sum(cka_memory):
    with cka_memory.measure("sum"):
        torch.ones(10 * (RANK + 1)).sum()

def test_reduce(cka_memory):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with cka_memory.measure("reduce"):
        {reduce}
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()

@pytest.mark.zero_retention
def test_last():
    {last}
"""


@dataclass(frozen=True)
class Job:
    """A finished run of torchrun."""

    status: int
    text: str
    folder: Path

    @property
    def report(self) -> dict[str, Any]:
        assert (self.folder / "r.json").is_file(), self.text
        return json.loads((self.folder / "r.json").read_text("utf-8"))

    @property
    def regions(self) -> list[tuple[str, str, int]]:
        """Test, worker and peak of each region."""
        return [
            (region["nodeid"].partition("::")[2], region["worker"], region["peak_bytes"])
            for region in self.report["regions"]
        ]

    def statuses(self) -> list[int]:
        """Return pytest's exit status on each rank that reached its end."""
        return [int(path.read_text()) for path in sorted(self.folder.glob("status-*"))]


@pytest.fixture
def torchrun(pytester, monkeypatch):
    """Run tests in two ranks on the CPU."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(source: str, *options: str) -> Job:
        pytester.makeconftest(STATUS)
        pytester.makepyfile(test_it=source)
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pytest"]
        words = ["python", "-m", *launch, "-p", "no:cacheprovider", *options]
        done = forked_processes.run(words, with_children=True)
        return Job(done.returncode, done.stdout + done.stderr, pytester.path)

    return run


ALL = ("--cka-memory-device=cpu", "--cka-memory-report", "--cka-memory-json=r.json")


@pytest.mark.slow
def test_ranks_write_one_report(torchrun):
    """The figures of both ranks are reported; the tests may use a process group of their own."""
    job = torchrun(TESTS.format(reduce="pass", last="pass"), *ALL, "--cka-memory-min-regions=3")
    assert (job.status, job.statuses()) == (0, [0, 0]), job.text
    assert job.regions == [
        ("test_sum", "rank 0", 44),
        ("test_sum", "rank 1", 84),
        ("test_reduce", "rank 0", 16),
        ("test_reduce", "rank 1", 16),
        ("test_last", "rank 0", 0),
        ("test_last", "rank 1", 0),
    ]
    assert job.report["session"]["workers"] == 2
    assert job.report["session"]["device"] == "cpu"
    assert job.report["missing"] == []
    assert job.text.count("figures written to") == 1
    lines = [line.strip() for line in job.text.splitlines()]
    assert len([line for line in lines if line.startswith("test_sum sum rank 1 ")]) == 1
    assert job.text.count("rank 1 measured 3 regions: see the report of rank 0") == 1


@pytest.mark.slow
def test_breach_on_one_rank_fails_all_ranks(torchrun):
    """All tests of the other rank passed."""
    last = "if RANK == 1: KEPT.append(torch.ones(100))"
    job = torchrun(TESTS.format(reduce="pass", last=last), *ALL)
    assert job.status == 1
    assert job.statuses() == [1, 1], job.text
    verdicts = {(r["worker"], r["verdict"]) for r in job.report["regions"] if not r["label"]}
    assert verdicts == {("rank 0", "ok"), ("rank 1", "BREACH")}
    assert job.text.count("FAILED: rank 1: 1 failed") == 1
    assert "BREACH test_it.py::test_last rank 1" in job.text
    assert (
        "held by test_it.KEPT[0]" in job.text
    )  # rank 1 was not stopped before it printed its failure


@pytest.mark.slow
def test_rank_that_crashes_is_named(torchrun):
    """The other ranks are stopped by torchrun, and rank 0 reports what was measured."""
    last = """
    while RANK == 1 and not os.path.exists("reached"):
        time.sleep(0.01)
    if RANK == 1:
        os._exit(3)
    open("reached", "w").close()
    time.sleep(60)
    """
    job = torchrun(TESTS.format(reduce="pass", last=last), *ALL)
    assert job.status == 1
    assert job.statuses() == [int(pytest.ExitCode.INTERRUPTED)], job.text
    assert [worker for _, worker, _ in job.regions] == ["rank 0", "rank 0"]
    assert job.report["missing"] == ["test_it.py::test_last"]
    assert "FAILED: rank 1: finished no test and sent nothing for 5 s" in job.text


@pytest.mark.slow
def test_rank_that_waits_for_a_failed_rank_is_reported_as_hung(torchrun):
    """A collective without its partner ends when the partner has ended."""
    source = TESTS.format(reduce="assert RANK == 0", last="pass")
    job = torchrun(source, *ALL, "--cka-memory-rank-timeout=1")
    assert job.status == 1
    assert ("test_reduce", "rank 1", 0) in job.regions, job.text
    # Either the lost connection or torchrun may end rank 0 first.
    failed = ("test_reduce", "rank 0", 16) in job.regions
    assert failed or "test_it.py::test_reduce" in job.report["missing"]
    assert "FAILED: rank 0: finished no test and sent nothing for 1 s" in job.text
    assert "FAILED: rank 1: 1 failed" in job.text


@pytest.mark.slow
def test_blocked_rank_reports_and_ends(torchrun):
    """A rank in a call that does not return cannot run a handler for the signal of torchrun.

    A store stands for a collective that does not notice that a rank has ended.
    """
    wait = """
    assert RANK == 0, "rank 0 waits for this rank"
    dist.HashStore().wait(["never"], timedelta(seconds=100))
    """
    source = TESTS.format(reduce="pass", last=wait)
    job = torchrun(source, *ALL, "--cka-memory-rank-timeout=1")
    assert job.status == 1
    assert job.statuses() == [1], job.text  # rank 0 did not get to the end of pytest
    assert [region[:2] for region in job.regions] == [
        ("test_sum", "rank 0"),
        ("test_sum", "rank 1"),
        ("test_reduce", "rank 0"),
        ("test_reduce", "rank 1"),
        ("test_last", "rank 1"),
    ]
    assert job.report["missing"] == ["test_it.py::test_last"]
    blocked = "SIGTERM: rank 0 was blocked in test_it.py::test_last and has been ended"
    assert f"{blocked}; it was at\n  File" in job.text
    assert 'in test_last\n    dist.HashStore().wait(["never"]' in job.text
    assert job.report["problems"] == [blocked, "rank 1: 1 failed"]
    assert "FAILED: rank 0: finished no test and sent nothing for 1 s" in job.text
    assert "the last test that it began is test_it.py::test_last" in job.text


@pytest.mark.slow
def test_ranks_that_measure_nothing_print_nothing(torchrun):
    """The plugin does not change their status either."""
    job = torchrun("def test_it(): pass\n")
    assert (job.status, job.statuses()) == (0, [0, 0]), job.text
    assert "rank 0" not in job.text
    assert "= cka-memory =" not in job.text
