"""The CPU meter agrees with a counter that replaces the allocator, on real networks.

``benchmarks/crosscheck.py`` checks every network of torchvision that fits in memory.
"""

import json
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import forked_processes
import pytest

from pytest_cka_memory.meters import blocks

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
BENCHMARKS = TESTS.parent / "benchmarks"
TRUST = (TESTS.parent / "docs" / "explanation" / "trust.md").read_text("utf-8")
NETWORKS = ("mobilenet_v3_small", "swin_t")  # convolutions, and what a transformer has
STAGES = ("build", "evaluate", "forward", "backward", "step", "release")


Counts = dict[str, list[dict[str, int]]]


@pytest.fixture(scope="module")
def counts(builder_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """Both counts of each network, stage by stage."""
    if find_spec(f"{blocks.__name__}._counter") is None:  # one that is broken is a fault
        pytest.skip("the native counter was not compiled")
    environment = {**builder_environment, "CKA_MEMORY_NATIVE": "1"}
    return counted(NETWORKS, environment, tmp_path_factory)


@pytest.fixture(scope="module")
def counts_of_ledger(
    builder_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Counts:
    """The same for the meter that measures where the allocator is not counted."""
    environment = {**builder_environment, "CKA_MEMORY_NATIVE": "0"}
    return counted(NETWORKS[:1], environment, tmp_path_factory)


def counted(
    networks: Sequence[str],
    environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Counts:
    """Run the benchmark on some networks."""
    pytest.importorskip("torchvision")
    if not hasattr(os, "fork"):
        pytest.skip("no fork here: each network runs in a fork of one process")
    results = tmp_path_factory.mktemp("crosscheck") / "r.json"
    command = ["python", "crosscheck.py", "--networks", *networks, f"--json={results}"]
    done = forked_processes.run(command, folder=BENCHMARKS, environment=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text("utf-8"))["rows"]
    assert [row.get("skipped") for row in rows] == [None] * len(networks)
    return {row["network"]: row["stages"] for row in rows}


@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_live_is_what_was_asked_of_the_allocator(counts, network) -> None:
    """After every stage, the meter and the independent counter agree to the byte on live memory."""
    stages = counts[network]
    assert tuple(stage["stage"] for stage in stages) == STAGES
    for stage in stages:
        assert stage["live_bytes"] == stage["counted_live_bytes"], stage
    assert stages[0]["live_bytes"] > 2**20
    assert stages[-1]["live_bytes"] == 0


@pytest.mark.parametrize("network", NETWORKS)
def test_the_peak_is_what_was_asked_of_the_allocator_at_once(counts, network) -> None:
    """The meter's peak equals the counter's, including what operators allocate and free inside."""
    for stage in counts[network]:
        assert stage["peak_bytes"] == stage["counted_peak_bytes"], stage


@pytest.mark.parametrize("network", NETWORKS[:1])
def test_the_peak_of_the_ledger_is_a_lower_bound(counts_of_ledger, network) -> None:
    """Counting storages misses what operators allocate inside, so its peak is at most the
    counter's.
    """
    for stage in counts_of_ledger[network]:
        assert stage["live_bytes"] == stage["counted_live_bytes"], stage
        assert stage["peak_bytes"] <= stage["counted_peak_bytes"], stage


def test_the_page_on_trust_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of the table in `trust.md` is the summary of the committed results."""
    pytest.importorskip("torchvision")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from crosscheck import NAMES, summary

    (file,) = (BENCHMARKS / "results").glob("crosscheck-*.json")
    rows = json.loads(file.read_text("utf-8"))["rows"]
    names = "|".join(NAMES.values())
    shown = re.findall(rf"^\| ((?:{names}) \|.*) \|$", TRUST, re.MULTILINE)
    assert shown == [" | ".join(line) for line in summary(rows)]
    skipped = [row["network"] for row in rows if "skipped" in row]
    for network in skipped:
        assert f"`{network}`" in TRUST
