"""Under torchrun: one report of all ranks, and a failure of one is a failure of each."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from pytest_cka_memory import meters
from pytest_cka_memory.core.report import ReportBuilder
from pytest_cka_memory.integrations import torchrun as ranks
from pytest_cka_memory.integrations.torchrun import RankSync, Rank

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
class ItemMeasurement:
    """A run of torchrun that has ended."""

    status: int
    text: str
    folder: Path

    @property
    def report(self) -> dict[str, Any]:
        assert (self.folder / "r.json").is_file(), self.text
        return json.loads((self.folder / "r.json").read_text("utf-8"))

    @property
    def regions(self) -> list[tuple[str, str, int]]:
        """Test, worker and peak."""
        return [
            (region["nodeid"].partition("::")[2], region["worker"], region["peak_bytes"])
            for region in self.report["regions"]
        ]

    def statuses(self) -> list[int]:
        """Pytest's own, of each rank that got so far."""
        return [int(path.read_text()) for path in sorted(self.folder.glob("status-*"))]


@pytest.fixture
def torchrun(pytester, monkeypatch):
    """Run tests in two ranks on the CPU."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(source: str, *options: str) -> ItemMeasurement:
        pytester.makeconftest(STATUS)
        pytester.makepyfile(test_it=source)
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pytest"]
        done = subprocess.run(
            [sys.executable, "-m", *launch, "-p", "no:cacheprovider", *options],
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        return ItemMeasurement(done.returncode, done.stdout + done.stderr, pytester.path)

    return run


ALL = ("--cka-memory-device=cpu", "--cka-memory-report", "--cka-memory-json=r.json")


def test_ranks_write_one_report(torchrun):
    """Each rank's figures side by side, from ranks that share a group of the tests' own."""
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
    assert job.text.count("test_sum sum rank 1") == 1
    assert job.text.count("rank 1 measured 3 regions: see the report of rank 0") == 1


def test_a_breach_on_one_rank_fails_both(torchrun):
    """Though the other's own tests all passed."""
    last = "if RANK == 1: KEPT.append(torch.ones(100))"
    job = torchrun(TESTS.format(reduce="pass", last=last), *ALL)
    assert job.status == 1
    assert job.statuses() == [1, 1], job.text
    verdicts = {(r["worker"], r["verdict"]) for r in job.report["regions"] if not r["label"]}
    assert verdicts == {("rank 0", "ok"), ("rank 1", "BREACH")}
    assert job.text.count("FAILED: rank 1: 1 failed") == 1
    assert "BREACH test_it.py::test_last rank 1" in job.text
    assert "held by test_it.KEPT[0]" in job.text  # the other rank got to print its own failure


def test_a_rank_that_dies_is_named(torchrun):
    """The others are stopped by torchrun, and rank 0 reports what there was."""
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
    assert "FAILED: rank 1: ended no test and sent nothing for 5 s" in job.text


def test_a_rank_that_waits_for_a_failed_one_is_given_up(torchrun):
    """A collective without its partner ends when that has given up; both figures are reported."""
    job = torchrun(
        TESTS.format(reduce="assert RANK == 0", last="pass"), *ALL, "--cka-memory-rank-timeout=1"
    )
    assert job.status == 1
    assert ("test_reduce", "rank 1", 0) in job.regions, job.text
    # Whether the lost connection or torchrun ends it first, is chance.
    failed = ("test_reduce", "rank 0", 16) in job.regions
    assert failed or "test_it.py::test_reduce" in job.report["missing"]
    assert "FAILED: rank 0: ended no test and sent nothing for 1 s" in job.text
    assert "FAILED: rank 1: 1 failed" in job.text


def test_ranks_that_measure_nothing_are_left_alone(torchrun):
    """No line of ours, no status of ours."""
    job = torchrun("def test_it(): pass\n")
    assert (job.status, job.statuses()) == (0, [0, 0]), job.text
    assert "rank 0" not in job.text
    assert "= cka-memory =" not in job.text


@pytest.fixture
def as_rank(scripted, monkeypatch):
    """Run one rank of two in this process, where the other has left its word before."""

    def run(number, source, *options, other, says, **given):
        board = HashStore()
        monkeypatch.setattr(ranks, "torchrun_store", lambda rank: board)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        for name, value in {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": number}.items():
            monkeypatch.setenv(name, str(value))
        absent = RankSync(Rank(1 - number, 2, 1 - number, "0"), 1.0)
        absent.say("leaving", True)
        if says is not None:
            absent.say(other, says)
        return scripted(source, "--cka-memory-rank-timeout=0.2", *options, **given)

    return run


NOTHING = {"takes_part": True, "failures": [], "gathered": ReportBuilder().to_dict()}
ONE = "import pytest\n@pytest.mark.zero_retention\ndef test_it(meter): pass\n"
TWO = f"{ONE}\ndef test_two(cka_memory): pass\n"


def _first(as_rank, says, *options, source=ONE, **given):
    return as_rank(0, source, *options, other="figures", says=says, **given)


def _second(as_rank, says, *options, source=ONE, **given):
    return as_rank(1, source, *options, other="verdict", says=says, **given)


@pytest.mark.parametrize(
    ("failures", "status"),
    [([], 0), (["1 failed"], 1), (["collected no tests", "interrupted"], 1)],
    ids=["none", "one", "two"],
)
def test_failures_elsewhere_fail_the_first_rank(as_rank, failures, status):
    """Each is named, with its rank."""
    run = _first(as_rank, {**NOTHING, "failures": failures})
    assert run.result.ret == status
    run.outcomes(passed=1)
    assert run.text.count("FAILED: rank 1: ") == len(failures)


@pytest.mark.parametrize(
    ("verdict", "status"),
    [([], 0), ([[1, "1 failed"]], 0), ([[0, "1 failed"]], 1), ([[0, "1 failed"], [1, "x"]], 1)],
    ids=["none", "its-own", "the-first", "both"],
)
def test_failures_elsewhere_fail_the_other_ranks(as_rank, verdict, status):
    """What failed on a rank itself shows in its own session."""
    run = _second(as_rank, verdict)
    assert run.result.ret == status
    assert run.text.count("FAILED: rank 0: 1 failed") == status
    assert "FAILED: rank 1" not in run.text


@pytest.mark.parametrize("rank", [_first, _second])
def test_a_rank_left_alone_fails(as_rank, rank):
    """Nothing came of the other: that is no pass."""
    run = rank(as_rank, None)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    run.outcomes(passed=1)
    assert "ended no test and sent nothing for 0.2 s" in run.text
    assert "longer --cka-memory-rank-timeout" in run.text


@pytest.mark.parametrize("rank", [_first, _second])
def test_a_rank_left_alone_with_nothing_to_measure_passes(as_rank, rank):
    """The plugin fails no session that has no use for it."""
    run = rank(as_rank, None, source="def test_it(): pass\n", writes_json=False)
    assert run.result.ret == pytest.ExitCode.OK
    assert "cka-memory =" not in run.text


def test_only_the_first_rank_writes(as_rank):
    """The others would write over it."""
    assert _first(as_rank, NOTHING).report is not None
    assert _second(as_rank, []).report is None


@pytest.mark.parametrize("rank", [_first, _second])
@pytest.mark.parametrize(
    ("source", "option"),
    [
        pytest.param(ONE.replace("zero_retention", "memory_baseline"), "--color=no", id="marker"),
        pytest.param(ONE, "--cka-memory-baseline=cka-memory-baseline.json", id="option"),
        pytest.param("def test_it(): pass", "--cka-memory-baseline=none.json", id="not-there"),
    ],
)
def test_a_baseline_that_cannot_be_used_stops_every_rank(as_rank, pytester, rank, source, option):
    """Also those that write no report."""
    (pytester.path / "cka-memory-baseline.json").write_text("[ {")
    run = rank(as_rank, NOTHING if rank is _first else [], option, source=source)
    run.refused("--cka-memory-baseline: ")


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("source", "times"), [(TWO, 1), ("def test_it(): pass\n", 0)])
def test_ranks_that_share_no_store_fail_where_they_measure(
    scripted, monkeypatch, number, source, times
):
    """Said once, with what to do; a session that measures nothing needs none."""
    told = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": number, "TORCHELASTIC_RUN_ID": "none"}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    run = scripted(source, writes_json=False)
    run.outcomes(passed=source.count("def "))
    assert run.result.ret == (pytest.ExitCode.TESTS_FAILED if times else pytest.ExitCode.OK)
    said = (
        "FAILED: the ranks cannot report together: torchrun shares no store with its ranks; leave"
    )
    assert run.text.count(said) == times


@pytest.mark.parametrize("rank", [_first, _second])
def test_ranks_that_only_collect_do_not_meet(as_rank, rank):
    """None waits for another."""
    run = rank(as_rank, None, "--collect-only", "--cka-memory-rank-timeout=99")
    assert run.result.ret == pytest.ExitCode.OK
    assert "FAILED" not in run.text


@pytest.mark.parametrize(("count", "status"), [(1, 0), (2, 1)])
def test_each_rank_must_measure_the_minimum(as_rank, count, status):
    """Two ranks with a region each are no two regions."""
    run = _first(as_rank, NOTHING, f"--cka-memory-min-regions={count}")
    assert run.result.ret == status
    assert ("FAILED: 1 regions measured" in run.text) == bool(status)


def test_ranks_count_apart(as_rank):
    """A test that one rank has no result of is missing, with all else of both kept."""
    theirs = ReportBuilder()
    theirs.expect(["test_it.py::test_it", "test_it.py::test_more"])
    theirs.finish("test_it.py::test_more")
    theirs.unmeasured["no reason"] = 2
    run = _first(as_rank, {**NOTHING, "gathered": theirs.to_dict()}, source=TWO)
    assert run.report["missing"] == ["test_it.py::test_it"]
    assert run.report["unmeasured"] == {"no reason": 2}
    assert [region["worker"] for region in run.regions] == ["rank 0", "rank 0"]


def test_devices_of_the_ranks_are_named_once_each(as_rank):
    """Of cards that differ, both."""
    theirs = ReportBuilder()
    facts = {"device": "cuda:1", "device_name": "no device"}
    theirs.facts = {**facts, "meter": "", "notes": [], "torch": None, "cuda": None}
    run = _first(as_rank, {**NOTHING, "gathered": theirs.to_dict()})
    assert run.report["session"]["device"] == "cpu, cuda:1"
    assert run.report["session"]["device_name"] == "no device"


def test_an_interrupted_rank_keeps_its_status(as_rank):
    """And says what it heard."""
    source = "import pytest\ndef test_it(cka_memory): pytest.exit('enough')\n"
    run = _first(as_rank, {**NOTHING, "failures": ["interrupted"]}, source=source)
    assert run.result.ret == pytest.ExitCode.INTERRUPTED
    assert "FAILED: rank 1: interrupted" in run.text


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_that_is_none_is_refused(scripted, seconds):
    """With what to write instead."""
    run = scripted(ONE, f"--cka-memory-rank-timeout={seconds}")
    run.refused("--cka-memory-rank-timeout: cannot read", "write e.g. 300")


def test_workers_under_torchrun_are_refused(as_rank):
    """Each would take itself for the rank that started it."""
    pytest.importorskip("xdist")
    _first(as_rank, NOTHING, "-n2").refused("pytest-xdist under torchrun")


@pytest.mark.parametrize(("local", "taken"), [(0, 0), (1, 1), (2, 0), (5, 1)])
@pytest.mark.parametrize("named", ["auto", "cuda"])
def test_a_rank_measures_its_own_gpu(monkeypatch, named, local, taken):
    """Of two here, counted around; a device that is named with its number stays."""
    seen = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: seen)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(meters, "_accelerator_meter", lambda kind, index: (kind, index))
    assert meters.meter_for(named, preferred=local) == ("cuda", taken)
    assert meters.meter_for("cuda:1", preferred=local) == ("cuda", 1)
