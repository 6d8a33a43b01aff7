"""What one rank does with what the others send it, or do not send: here they are in a store."""

import pytest
import torch
from torch.distributed import HashStore

from pytest_cka_memory.core.report import ReportBuilder
from pytest_cka_memory.integrations import Rank
from pytest_cka_memory.integrations import torchrun as ranks
from pytest_cka_memory.integrations.torchrun import RankSync
from pytest_cka_memory.meters import selection
from pytest_cka_memory.plugin import rank_reporter as reporting


@pytest.fixture
def as_rank(scripted, monkeypatch):
    """Run one of two ranks in this process; the other's messages are in the store already."""

    def run(number, source, *options, other, says, began=None, **given):
        board = HashStore()
        monkeypatch.setattr(ranks, "torchrun_store", lambda rank: board)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        for name, value in {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": number}.items():
            monkeypatch.setenv(name, str(value))
        absent = RankSync(Rank(1 - number, 2, 1 - number, "0"), 1.0)
        absent.publish("leaving", True)
        if began is not None:
            absent.begin(began)
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


def test_rank_that_failed_does_not_wait_long_for_a_rank_that_waits_for_it(as_rank, monkeypatch):
    """The other may hang in a collective, and torchrun ends it only when this rank has ended."""
    monkeypatch.setattr(reporting, "SHORTEST_WAIT_AFTER_FAILURE_S", 0.3)
    source = "import pytest\ndef test_it(cka_memory): assert False\n"
    for rank in (_first, _second):
        run = rank(as_rank, None, "--cka-memory-rank-timeout=99", source=source)
        run.assert_outcomes(failed=1)
        assert "sent nothing for 99 s" not in run.text
        assert "after this rank had failed or was stopped" in run.text


@pytest.mark.parametrize(
    ("failures", "status"),
    [([], 0), (["1 failed"], 1), (["collected no tests", "interrupted"], 1)],
    ids=["none", "one", "two"],
)
def test_failures_on_other_ranks_fail_rank_0(as_rank, failures, status):
    """Each failure is named with its rank."""
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
    """Failures of the rank's own tests are not repeated."""
    run = _second(as_rank, verdict)
    assert run.result.ret == status
    assert run.text.count("FAILED: rank 0: 1 failed") == status
    assert "FAILED: rank 1" not in run.text


@pytest.mark.parametrize("rank", [_first, _second])
def test_rank_that_hears_nothing_from_the_other_fails(as_rank, rank):
    """The other rank sent nothing, so the session must not pass."""
    run = rank(as_rank, None)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    run.assert_outcomes(passed=1)
    assert "finished no test and sent nothing for 0.2 s" in run.text
    assert "longer --cka-memory-rank-timeout" in run.text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [_first, _second])
@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("test_passes", "nothing for 1 s, so the rank has ended or hangs"),
        ("test_fails", "nothing for 0.5 s, after this rank had failed or was stopped"),
    ],
)
def test_wait_after_a_failure_is_short_for_ranks_that_may_wait(
    as_rank, monkeypatch, rank, test, expected
):
    """A rank in a test before the one that failed cannot wait for it, so it is only slower."""
    monkeypatch.setattr(reporting, "SHORTEST_WAIT_AFTER_FAILURE_S", 0.5)
    source = "def test_passes(cka_memory): pass\ndef test_fails(cka_memory): assert False\n"
    run = rank(
        as_rank, None, "--cka-memory-rank-timeout=1", source=source, began=f"test_it.py::{test}"
    )
    run.assert_outcomes(passed=1, failed=1)
    assert expected in run.text
    assert f"the last test that it began is test_it.py::{test}" in run.text


@pytest.mark.parametrize("rank", [_first, _second])
def test_rank_that_measures_nothing_passes_without_the_other(as_rank, rank):
    """The plugin does not fail sessions that do not use it."""
    run = rank(as_rank, None, source="def test_it(): pass\n", writes_json=False)
    assert run.result.ret == pytest.ExitCode.OK
    assert "cka-memory =" not in run.text


def test_only_rank_0_writes_the_report(as_rank):
    """Otherwise ranks would overwrite each other's report."""
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
    """Ranks that do not write the report check it, too."""
    (pytester.path / "cka-memory-baseline.json").write_text("[ {")
    run = rank(as_rank, NOTHING if rank is _first else [], option, source=source)
    run.assert_refused("--cka-memory-baseline: ")


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("source", "times"), [(TWO, 1), ("def test_it(): pass\n", 0)])
def test_ranks_without_a_shared_store_fail_if_they_measure(
    scripted, monkeypatch, number, source, times
):
    """One line says what to do; a session that measures nothing needs no store."""
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
    """--collect-only does not wait for the other rank."""
    run = rank(as_rank, None, "--collect-only", "--cka-memory-rank-timeout=99")
    assert run.result.ret == pytest.ExitCode.OK
    assert "FAILED" not in run.text


@pytest.mark.parametrize(("count", "status"), [(1, 0), (2, 1)])
def test_each_rank_must_measure_the_minimum(as_rank, count, status):
    """Two ranks with one region each do not reach a minimum of two."""
    run = _first(as_rank, NOTHING, f"--cka-memory-min-regions={count}")
    assert run.result.ret == status
    assert ("FAILED: 1 region measured" in run.text) == bool(status)


def test_test_without_a_result_on_one_rank_is_missing(as_rank):
    """The regions and counts of both ranks are kept."""
    theirs = ReportBuilder()
    theirs.expect(["test_it.py::test_it", "test_it.py::test_more"])
    theirs.finish("test_it.py::test_more")
    theirs.unmeasured["no reason"] = 2
    run = _first(as_rank, {**NOTHING, "report": theirs.to_dict()}, source=TWO)
    assert run.report["missing"] == ["test_it.py::test_it"]
    assert run.report["unmeasured"] == {"no reason": 2}
    assert [region["worker"] for region in run.regions] == ["rank 0", "rank 0"]


def test_each_device_of_the_ranks_is_named_once(as_rank):
    """Both are named if they differ."""
    theirs = ReportBuilder()
    facts = {"device": "cuda:1", "device_name": "no device"}
    theirs.facts = {**facts, "meter": "", "notes": [], "torch": None, "cuda": None}
    run = _first(as_rank, {**NOTHING, "report": theirs.to_dict()})
    assert run.report["session"]["device"] == "cpu, cuda:1"
    assert run.report["session"]["device_name"] == "no device"


def test_interrupted_rank_keeps_its_status(as_rank):
    """It also prints the failures of the other rank."""
    source = "import pytest\ndef test_it(cka_memory): pytest.exit('enough')\n"
    run = _first(as_rank, {**NOTHING, "failures": ["interrupted"]}, source=source)
    assert run.result.ret == pytest.ExitCode.INTERRUPTED
    assert "FAILED: rank 1: interrupted" in run.text


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_invalid_timeout_is_refused(scripted, seconds):
    """The error says what to write instead."""
    run = scripted(ONE, f"--cka-memory-rank-timeout={seconds}")
    run.assert_refused("--cka-memory-rank-timeout: cannot read", "write e.g. 300")


def test_xdist_under_torchrun_is_refused(as_rank):
    """Every worker would act as the rank that started it."""
    pytest.importorskip("xdist")
    _first(as_rank, NOTHING, "-n2").assert_refused("pytest-xdist under torchrun")


@pytest.mark.parametrize(("local", "taken"), [(0, 0), (1, 1), (2, 0), (5, 1)])
@pytest.mark.parametrize("named", ["auto", "cuda"])
def test_each_rank_measures_its_own_gpu(monkeypatch, named, local, taken):
    """With two GPUs, rank 2 uses the first again; a device named with its number is not changed."""
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
