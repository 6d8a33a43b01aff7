"""What the docs say of the soak test and of other projects' suites is what was measured."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = " ".join((ROOT / "docs" / "explanation" / "trust.md").read_text("utf-8").split())
VALUES = " ".join((ROOT / "docs" / "explanation" / "values.md").read_text("utf-8").split())


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


def test_causes_of_outcomes_that_differ_on_the_emulated_device_are_those_that_were_measured():
    """The page counts the tests of other projects by cause as the result does."""
    (file,) = RESULTS.glob("emulated-suites-torch-*.json")
    rows = json.loads(file.read_text("utf-8"))["suites"]
    using = [row for row in rows if 100 * row["allocating"] > row["ran"]]
    refused = sum(row["refused by PyTorch"] for row in rows)
    for text in (
        f"| {refused} refused by PyTorch | all of kornia's augmentation",
        f"| {sum(row['skipped on the CPU'] for row in rows)} skipped on the CPU |",
        f"| {sum(row['other'] for row in rows)} with another outcome | both of kornia's geometry",
        f"{sum(row['failed on both'] for row in using)} of them fail on both",
        f"All {refused} tests fail with its message at one of the four lines",
        f"{sum(row['refused without values'] for row in rows)} of them fail in the same way",
    ):
        assert text in VALUES
    accused = [row["suite"] for row in rows if row["refused at"]]
    assert all(name.startswith("kornia: augmentation: ") for name in accused)
    assert len({line for row in rows for line in row["refused at"]}) == 4
    assert [row["suite"] for row in rows if row["others"]] == ["kornia: geometry"]
    (other,) = [row for row in rows if row not in using]
    assert other["same"] == other["ran"]
    assert f"{other['allocating']} of {other['ran']:,} allocate on it" in VALUES


def test_figures_of_large_sessions_and_of_logs_are_those_that_were_measured():
    """The page on costs has the time, memory and sizes of the two results."""
    page = " ".join((ROOT / "docs" / "explanation" / "cost.md").read_text("utf-8").split())
    (file,) = RESULTS.glob("many-tests-torch-*.json")
    many = json.loads(file.read_text("utf-8"))
    extra = round((many["peak_bytes_with"] - many["peak_bytes_without"]) / 2**20)
    report, site = (many["file_bytes"][name] / 2**20 for name in ("r.json", "r.html"))
    (file,) = RESULTS.glob("log-size-torch-*.json")
    narrow, wide, _ = json.loads(file.read_text("utf-8")).values()
    for text in (
        f"takes {many['user_seconds_with']} s of user CPU time",
        f"and {many['user_seconds_without']} s without the plugin",
        f"memory is {extra} MB higher",
        f"The JSON report has {report:.1f} MB, the page {site:.1f} MB",
        f"has {narrow['lines']} lines and {narrow['bytes'] / 1000:.1f} KB in 80 columns",
        f"{wide['lines']} lines and {wide['bytes'] / 1000:.1f} KB in 120",
    ):
        assert text in page
    assert narrow["tests with an annotation"] == wide["tests with an annotation"] == 8
