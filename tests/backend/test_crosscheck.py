"""The CPU meter agrees with a counter that replaces the allocator, on real networks.

``tests/benchmarks/crosscheck.py`` checks every network of torchvision that fits in memory.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BENCHMARKS = TESTS / "benchmarks"
TRUST = (TESTS.parent / "docs" / "explanation" / "trust.md").read_text("utf-8")
NETWORKS = (
    "resnet18",
    "mobilenet_v3_small",
    "squeezenet1_1",
    "swin_t",
    "ssdlite320_mobilenet_v3_large",
)
STAGES = ("build", "evaluate", "forward", "backward", "step", "release")


@pytest.fixture(scope="module")
def counts(
    builder_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, int]]]:
    """Both counts of each network, stage by stage."""
    pytest.importorskip("torchvision")
    if not hasattr(os, "fork"):
        pytest.skip("no fork here: each network runs in a fork of one process")
    results = tmp_path_factory.mktemp("crosscheck") / "r.json"
    command = [sys.executable, str(BENCHMARKS / "crosscheck.py"), "--networks", *NETWORKS]
    done = subprocess.run(
        [*command, f"--json={results}"],
        env=builder_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text("utf-8"))["rows"]
    assert [row.get("skipped") for row in rows] == [None] * len(NETWORKS)
    return {row["network"]: row["stages"] for row in rows}


@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_live_is_what_was_asked_of_the_allocator(counts, network) -> None:
    """To the byte, after every stage, and nothing collected before."""
    stages = counts[network]
    assert tuple(stage["stage"] for stage in stages) == STAGES
    for stage in stages:
        assert stage["live_bytes"] == stage["counted_live_bytes"], stage
    assert stages[0]["live_bytes"] > 2**20
    assert stages[-1]["live_bytes"] == 0


@pytest.mark.parametrize("network", NETWORKS)
def test_the_peak_is_a_lower_bound(counts, network) -> None:
    """It misses what operators allocate for themselves, and never counts what is not there."""
    for stage in counts[network]:
        assert stage["peak_bytes"] <= stage["counted_peak_bytes"], stage


def test_the_page_on_trust_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of its table is the summary of the committed results."""
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
