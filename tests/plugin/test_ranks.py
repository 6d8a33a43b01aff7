"""Under torchrun all ranks share one report, and a failure on one rank fails every rank."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_processes
import pytest
import torch
from torch.distributed import HashStore

from pytest_cka_memory.core.report_builder import ReportBuilder
from pytest_cka_memory.integrations import torchrun as ranks
from pytest_cka_memory.integrations.ranks import Rank
from pytest_cka_memory.integrations.torchrun import RankSync
from pytest_cka_memory.meters import selection
from pytest_cka_memory.plugin.report import torchrun as reporting

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
        done = forked_processes.run(words)
        return Job(done.returncode, done.stdout + done.stderr, pytester.path)

    return run


ALL = ("--cka-memory-device=cpu", "--cka-memory-report", "--cka-memory-json=r.json")


def test_ranks_write_one_report(torchrun):
    """Ranks write one report with all figures, and tests may use a process group of their own."""
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


def test_breach_on_one_rank_fails_all_ranks(torchrun):
    """A breach on one rank fails the others, although all of their tests passed."""
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


def test_rank_that_crashes_is_named(torchrun):
    """If a rank crashes, torchrun stops the others, and rank 0 reports what was measured."""
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


def test_rank_that_waits_for_a_failed_rank_is_reported_as_hung(torchrun):
    """A rank that waits in a collective for a failed one is reported as hung, and ends with it."""
    job = torchrun(
        TESTS.format(reduce="assert RANK == 0", last="pass"), *ALL, "--cka-memory-rank-timeout=1"
    )
    assert job.status == 1
    assert ("test_reduce", "rank 1", 0) in job.regions, job.text
    # Either the lost connection or torchrun may end rank 0 first.
    failed = ("test_reduce", "rank 0", 16) in job.regions
    assert failed or "test_it.py::test_reduce" in job.report["missing"]
    assert "FAILED: rank 0: finished no test and sent nothing for 1 s" in job.text
    assert "FAILED: rank 1: 1 failed" in job.text


def test_rank_that_failed_does_not_wait_long_for_a_rank_that_waits_for_it(as_rank, monkeypatch):
    """A failed rank does not wait long for one that hangs, which torchrun ends only after it."""
    monkeypatch.setattr(reporting, "SHORTEST_WAIT_AFTER_FAILURE_S", 0.3)
    source = "import pytest\ndef test_it(cka_memory): assert False\n"
    for rank in (_first, _second):
        run = rank(as_rank, None, "--cka-memory-rank-timeout=99", source=source)
        run.assert_outcomes(failed=1)
        assert "sent nothing for 99 s" not in run.text
        assert "after this rank had failed or was stopped" in run.text


def test_ranks_that_measure_nothing_print_nothing(torchrun):
    """Ranks that measure nothing print nothing and keep their status."""
    job = torchrun("def test_it(): pass\n")
    assert (job.status, job.statuses()) == (0, [0, 0]), job.text
    assert "rank 0" not in job.text
    assert "= cka-memory =" not in job.text


@pytest.fixture
def as_rank(scripted, monkeypatch):
    """Run one of two ranks in this process; the other's messages are in the store already."""

    def run(number, source, *options, other, says, **given):
        board = HashStore()
        monkeypatch.setattr(ranks, "torchrun_store", lambda rank: board)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        for name, value in {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": number}.items():
            monkeypatch.setenv(name, str(value))
        absent = RankSync(Rank(1 - number, 2, 1 - number, "0"), 1.0)
        absent.publish("leaving", True)
        if says is not None:
            absent.publish(other, says)
        return scripted(source, "--cka-memory-rank-timeout=0.2", *options, **given)

    return run


NOTHING = {"takes_part": True, "failures": [], "report": ReportBuilder().to_dict()}
ONE = "import pytest\n@pytest.mark.zero_retention\ndef test_it(meter): pass\n"
TWO = f"{ONE}\ndef test_two(cka_memory): pass\n"


def _first(as_rank, says, *options, source=ONE, **given):
    return as_rank(0, source, *options, other="results", says=says, **given)


def _second(as_rank, says, *options, source=ONE, **given):
    return as_rank(1, source, *options, other="failures", says=says, **given)


@pytest.mark.parametrize(
    ("failures", "status"),
    [([], 0), (["1 failed"], 1), (["collected no tests", "interrupted"], 1)],
    ids=["none", "one", "two"],
)
def test_failures_on_other_ranks_fail_rank_0(as_rank, failures, status):
    """Failures on another rank fail rank 0, and each is named with its rank."""
    run = _first(as_rank, {**NOTHING, "failures": failures})
    assert run.result.ret == status
    run.assert_outcomes(passed=1)
    assert run.text.count("FAILED: rank 1: ") == len(failures)


@pytest.mark.parametrize(
    ("verdict", "status"),
    [([], 0), ([[1, "1 failed"]], 0), ([[0, "1 failed"]], 1), ([[0, "1 failed"], [1, "x"]], 1)],
    ids=["none", "its-own", "the-first", "both"],
)
def test_failures_on_rank_0_fail_the_other_ranks(as_rank, verdict, status):
    """Failures on rank 0 fail the other ranks, which do not repeat their own."""
    run = _second(as_rank, verdict)
    assert run.result.ret == status
    assert run.text.count("FAILED: rank 0: 1 failed") == status
    assert "FAILED: rank 1" not in run.text


@pytest.mark.parametrize("rank", [_first, _second])
def test_rank_that_hears_nothing_from_the_other_fails(as_rank, rank):
    """If the other rank sent nothing, the session must not pass."""
    run = rank(as_rank, None)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    run.assert_outcomes(passed=1)
    assert "finished no test and sent nothing for 0.2 s" in run.text
    assert "longer --cka-memory-rank-timeout" in run.text


@pytest.mark.parametrize("rank", [_first, _second])
def test_rank_that_measures_nothing_passes_without_the_other(as_rank, rank):
    """A rank that measures nothing passes without the other: the plugin is not used."""
    run = rank(as_rank, None, source="def test_it(): pass\n", writes_json=False)
    assert run.result.ret == pytest.ExitCode.OK
    assert "cka-memory =" not in run.text


def test_only_rank_0_writes_the_report(as_rank):
    """Only rank 0 writes the report, because ranks would overwrite each other's."""
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
def test_unusable_baseline_ends_every_rank(as_rank, pytester, rank, source, option):
    """An unusable baseline ends every rank, also those that do not write the report."""
    (pytester.path / "cka-memory-baseline.json").write_text("[ {")
    run = rank(as_rank, NOTHING if rank is _first else [], option, source=source)
    run.assert_refused("--cka-memory-baseline: ")


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("source", "times"), [(TWO, 1), ("def test_it(): pass\n", 0)])
def test_ranks_without_a_shared_store_fail_if_they_measure(
    scripted, monkeypatch, number, source, times
):
    """Without a shared store, ranks that measure fail with one line; others need no store."""
    variables = {
        "RANK": number,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": number,
        "TORCHELASTIC_RUN_ID": "none",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    run = scripted(source, writes_json=False)
    run.assert_outcomes(passed=source.count("def "))
    assert run.result.ret == (pytest.ExitCode.TESTS_FAILED if times else pytest.ExitCode.OK)
    message = (
        "FAILED: the ranks cannot write one report: torchrun does not share its store with the "
        "ranks; use --rdzv-backend=c10d"
    )
    assert run.text.count(message) == times


@pytest.mark.parametrize("rank", [_first, _second])
def test_ranks_that_only_collect_do_not_wait(as_rank, rank):
    """A rank with --collect-only does not wait for the other rank."""
    run = rank(as_rank, None, "--collect-only", "--cka-memory-rank-timeout=99")
    assert run.result.ret == pytest.ExitCode.OK
    assert "FAILED" not in run.text


@pytest.mark.parametrize(("count", "status"), [(1, 0), (2, 1)])
def test_each_rank_must_measure_the_minimum(as_rank, count, status):
    """Each rank must measure the minimum: two with one region each do not make two."""
    run = _first(as_rank, NOTHING, f"--cka-memory-min-regions={count}")
    assert run.result.ret == status
    assert ("FAILED: 1 region measured" in run.text) == bool(status)


def test_test_without_a_result_on_one_rank_is_missing(as_rank):
    """If a test has no result on one rank, it is missing, and both ranks' regions are kept."""
    theirs = ReportBuilder()
    theirs.expect(["test_it.py::test_it", "test_it.py::test_more"])
    theirs.finish("test_it.py::test_more")
    theirs.unmeasured["no reason"] = 2
    run = _first(as_rank, {**NOTHING, "report": theirs.to_dict()}, source=TWO)
    assert run.report["missing"] == ["test_it.py::test_it"]
    assert run.report["unmeasured"] == {"no reason": 2}
    assert [region["worker"] for region in run.regions] == ["rank 0", "rank 0"]


def test_each_device_of_the_ranks_is_named_once(as_rank):
    """If ranks have different devices, both are named; equal ones are named once."""
    theirs = ReportBuilder()
    facts = {"device": "cuda:1", "device_name": "no device"}
    theirs.facts = {**facts, "meter": "", "notes": [], "torch": None, "cuda": None}
    run = _first(as_rank, {**NOTHING, "report": theirs.to_dict()})
    assert run.report["session"]["device"] == "cpu, cuda:1"
    assert run.report["session"]["device_name"] == "no device"


def test_interrupted_rank_keeps_its_status(as_rank):
    """An interrupted rank keeps its status, and also prints failures of the other rank."""
    source = "import pytest\ndef test_it(cka_memory): pytest.exit('enough')\n"
    run = _first(as_rank, {**NOTHING, "failures": ["interrupted"]}, source=source)
    assert run.result.ret == pytest.ExitCode.INTERRUPTED
    assert "FAILED: rank 1: interrupted" in run.text


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_invalid_timeout_is_refused(scripted, seconds):
    """The error for an invalid timeout of ranks says what to write."""
    run = scripted(ONE, f"--cka-memory-rank-timeout={seconds}")
    run.assert_refused("--cka-memory-rank-timeout: cannot read", "write e.g. 300")


def test_xdist_under_torchrun_is_refused(as_rank):
    """Under torchrun each worker of xdist would act as the rank, so xdist is refused."""
    pytest.importorskip("xdist")
    _first(as_rank, NOTHING, "-n2").assert_refused("pytest-xdist under torchrun")


@pytest.mark.parametrize(("local", "taken"), [(0, 0), (1, 1), (2, 0), (5, 1)])
@pytest.mark.parametrize("named", ["auto", "cuda"])
def test_each_rank_measures_its_own_gpu(monkeypatch, named, local, taken):
    """Each rank measures its own GPU: with two, rank 2 has the first, unless one is named."""
    seen = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: seen)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(selection, "_accelerator_meter", lambda kind, index: (kind, index))
    current = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    assert selection.meter_for(named, preferred=local) == ("cuda", taken)
    assert selection.meter_for("cuda:1", preferred=local) == ("cuda", 1)
    # A DeviceMesh leaves the device alone once CUDA is initialized, which measuring does.
    assert current == [taken, 1]
    assert selection.meter_for("cuda:1") == ("cuda", 1)
    assert current == [taken, 1]
