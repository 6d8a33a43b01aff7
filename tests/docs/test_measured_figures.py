"""What the docs say of the soak test and of other projects' suites is what was measured."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
PAGE = " ".join((ROOT / "docs" / "explanation" / "trust.md").read_text("utf-8").split())


def test_table_of_suites_is_the_one_that_was_measured():
    """Each row of the table of suites has the measured figures; no
    outcome changed, none crashed.
    """
    data = json.loads((RESULTS / "other-suites-amd-epyc-torch-2.15.0.json").read_text("utf-8"))
    for row in data["suites"]:
        assert f"| {row['suite']} {row['version']}, " in PAGE
        assert (
            f"| {row['tests']} | {row['regions']} | {len(row['changed'])} "
            f"| {row['user_seconds_without']:.1f} | {row['user_seconds_with']:.1f} "
            f"| {row['ratio']:.2f} |"
        ) in PAGE
        assert [row["changed"], row["crashed"]] == [[], False]


def test_figures_of_the_soak_test_are_those_that_were_measured():
    """The page has the figures of the soak test: ten thousand
    regions leave no additional object.
    """
    data = json.loads((RESULTS / "soak-torch-2.15.0.json").read_text("utf-8"))
    start, first, *_, last = rows = data["rows"]
    rise = (last["rss_bytes"] - start["rss_bytes"]) / 2**20
    assert last["regions"] == 10_000
    assert f"resident memory rose by {rise:.2f} MB" in PAGE
    assert (
        f"a region took {first['ms_per_region']:.2f} ms in the first thousand, "
        f"{last['ms_per_region']:.2f} in the last"
    ) in PAGE
    # Between two readings the benchmark itself keeps one row.
    assert [row["objects"] - start["objects"] for row in rows] == list(range(11))
