"""What the README says of other suites and of the soak is what was measured and committed."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
README = " ".join((ROOT / "README.md").read_text("utf-8").split())


def test_the_table_of_suites_is_the_one_that_was_measured():
    """Row by row; and no outcome changed, none crashed."""
    data = json.loads((RESULTS / "other-suites-torch-2.15.0.json").read_text("utf-8"))
    for row in data["suites"]:
        assert f"| {row['suite']} {row['version']}, " in README
        assert (
            f"| {row['tests']} | {row['regions']} | {len(row['changed'])} "
            f"| {row['user_seconds_without']:.1f} | {row['user_seconds_with']:.1f} "
            f"| {row['ratio']:.2f} |"
        ) in README
        assert [row["changed"], row["crashed"]] == [[], False]


def test_the_soak_is_the_one_that_was_measured():
    """Ten thousand regions, and not an object more."""
    data = json.loads((RESULTS / "soak-torch-2.15.0.json").read_text("utf-8"))
    start, first, *_, last = rows = data["rows"]
    rise = (last["rss_bytes"] - start["rss_bytes"]) / 2**20
    assert last["regions"] == 10_000
    assert f"resident memory rose by {rise:.2f} MB" in README
    assert (
        f"a region took {first['ms_per_region']:.2f} ms in the first thousand, "
        f"{last['ms_per_region']:.2f} in the last"
    ) in README
    # A row of the benchmark's own is kept between two looks.
    assert [row["objects"] - start["objects"] for row in rows] == list(range(11))
