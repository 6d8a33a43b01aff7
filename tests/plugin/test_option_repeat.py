"""``--cka-memory-repeat=N`` runs each measured test N times and judges growth over the runs."""

import pytest

TESTS = """
import unittest
import pytest
import torch

KEPT, RUNS = [], []


@pytest.mark.zero_retention
def test_clean(cka_memory):
    RUNS.append(1)
    with cka_memory.measure("sum"):
        torch.ones(100, device=cka_memory.device).sum()


def test_fills_a_cache_once(cka_memory):
    if not KEPT:
        KEPT.append(torch.ones(100, device=cka_memory.device))


def test_leaks(cka_memory):
    KEPT.append(torch.ones(100, device=cka_memory.device))


def test_leaks_beside_a_region(cka_memory):
    with cka_memory.measure("sum"):
        torch.ones(100, device=cka_memory.device).sum()
    KEPT.append(torch.ones(50, device=cka_memory.device))


@pytest.mark.max_peak_mb(1)
class TestMethods(unittest.TestCase):
    def test_leaks_too(self):
        KEPT.append(torch.ones(25))


def test_unmeasured():
    assert len(RUNS) == 8
"""
DEVICES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("emulate:cuda", id="emulated", marks=pytest.mark.emulates),
]


@pytest.mark.parametrize("device", DEVICES)
def test_growth_over_the_runs_fails_a_test_and_what_is_filled_once_does_not(session, device):
    """A test that keeps memory in each run fails; one that fills a cache in the first passes."""
    options = f"--cka-memory-device={device}", "--cka-memory-repeat=8", "-p", "no:randomly"
    run = session(TESTS, *options, "--cka-memory-allow-no-allocations", forked=True)
    leaking = 3 if device == "cpu" else 2
    run.assert_outcomes(passed=6 - leaking, failed=leaking)
    over_runs = {
        region["nodeid"].rpartition("::")[2]: region
        for region in run.regions
        if region["label"] == "repeated runs"
    }
    growth = {name: region["growth_bytes_per_batch"] for name, region in over_runs.items()}
    assert growth == {
        "test_clean": 0,
        "test_fills_a_cache_once": 0,
        "test_leaks": 400,
        "test_leaks_beside_a_region": 200,
        "test_leaks_too": 100 if device == "cpu" else 0,
    }
    assert all(region["batches"] == 8 for region in over_runs.values())
    text = " ".join(run.text.split())
    assert "--cka-memory-repeat=8 broken: grew by 400 bytes per run over 8 runs" in text
    assert "held by test_it.KEPT" in text


def test_regions_of_the_last_run_are_reported(session):
    """Regions of a test are there once, with their own label and limits."""
    run = session(TESTS, "--cka-memory-device=cpu", "--cka-memory-repeat=8", forked=True)
    regions = [region for region in run.regions if region["nodeid"].endswith("test_clean")]
    assert [region["label"] for region in regions] == ["sum", "repeated runs"]
    assert regions[0]["limits"] == ["zero_retention"]
    assert regions[1]["limits"] == ["--cka-memory-repeat=8"]


def test_failure_in_a_later_run_names_the_run(scripted):
    """A test that fails in its third run fails, and the report says in which run."""
    run = scripted(
        """
        RUNS = []

        def test_it(cka_memory):
            RUNS.append(1)
            assert len(RUNS) < 3
        """,
        "--cka-memory-repeat=5",
    )
    run.assert_outcomes(failed=1)
    assert "run 3 of 5 has failed" in run.text
    assert {region["verdict"] for region in run.regions} == {"not judged"}


@pytest.mark.parametrize("given", ["4", "many", "-5"])
def test_too_few_runs_are_a_usage_error(session, given):
    """Fewer than five runs cannot be judged."""
    run = session("def test_it(): pass", f"--cka-memory-repeat={given}")
    run.assert_refused(f"--cka-memory-repeat: cannot use '{given}'", "at least 5")


def test_test_that_another_plugin_runs_again_is_named(scripted):
    """With pytest-rerunfailures the last run is judged, and a note in the report says so."""
    pytest.importorskip("pytest_rerunfailures")
    run = scripted(
        """
        RUNS = []

        def test_it(cka_memory, meter):
            meter.allocate(8)
            RUNS.append(1)
            assert len(RUNS) == 2
        """,
        "--reruns=2",
        "--cka-memory-report",
    )
    run.assert_outcomes(passed=1)
    assert run.region["retained_bytes"] == 8
    note = "another plugin ran 1 test more than once; the last run was judged: test_it.py::test_it"
    assert note in run.report["session"]["notes"]
    assert note in " ".join(run.text.split())
