"""What GitHub Actions is told: its workflow commands, escaped, bounded, worst first."""

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.verdicts import Report, judge
from pytest_cka_memory.integrations.github import Step, step_of
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports import github


def record(retained, completed=True, label="r"):
    return RegionRecord(
        label=label,
        completed=completed,
        start_bytes=0,
        end_bytes=retained,
        peak_bytes=retained,
        retained_bytes=retained,
    )


def result(nodeid, retained, marker="zero_retention", args=(), **kwargs):
    return judge(nodeid, record(retained, **kwargs), [limit_from_marker(marker, args, {})])


def commands(report):
    return github.annotations(report, lambda file: file)


@pytest.mark.parametrize(
    ("message", "title", "line"),
    [
        ("plain", "plain", "::error title=plain::plain"),
        ("50 %\r\nnext", "a", "::error title=a::50 %25%0D%0Anext"),
        ("a: b, c", "a: b, c", "::error title=a%3A b%2C c::a: b, c"),
        ("::error::x", "%3A", "::error title=%253A::::error::x"),
        ("", "x\ny", "::error title=x%0Ay::"),
    ],
    ids=["plain", "lines", "delimiters", "commands", "title-lines"],
)
def test_text_is_escaped_as_the_runner_reads_it(message, title, line):
    """Per cent and line ends everywhere, colon and comma in properties."""
    assert github.command("error", message, title=title) == line


def test_a_breach_names_its_line():
    """File, line, limit, region and figure are in one command."""
    broken = result("tests/test_a.py::test_it", 5)
    report = Report({}, (broken,), locations={broken.nodeid: ("tests/test_a.py", 12)})
    (command,) = commands(report)
    assert command.startswith(
        "::error file=tests/test_a.py,line=12,title=zero_retention broken::"
        "tests/test_a.py::test_it r: retained 5 bytes, allowed 0 bytes: 5 bytes too much%0A"
    )


def test_a_test_of_another_repository_is_named_without_its_file():
    """A path that the repository does not have would be shown nowhere."""
    broken = result("t.py::test_it", 5)
    report = Report({}, (broken,), locations={broken.nodeid: ("../t.py", 12)})
    (command,) = github.annotations(report, lambda file: None)
    assert command.startswith("::error title=zero_retention broken::t.py::test_it r: ")


def test_the_worst_come_first_and_the_rest_are_counted():
    """GitHub shows ten: nine of them, and one that says how many there are."""
    report = Report({}, tuple(result(f"t.py::test_{n}", n + 1) for n in range(30)))
    found = commands(report)
    assert len(found) == github.MOST_A_KIND
    assert [f"::t.py::test_{29 - n} " in command for n, command in enumerate(found[:9])] == [
        True
    ] * 9
    assert found[9] == "::error title=memory::and 21 more, in the job's summary"


@pytest.mark.parametrize(("count", "shown"), [(10, 10), (11, 10)], ids=["all", "one-too-many"])
def test_exactly_as_many_as_github_shows_are_all_shown(count, shown):
    """The tenth is not given up for a line that counts nothing."""
    found = commands(Report({}, tuple(result(f"t.py::test_{n}", 1) for n in range(count))))
    assert len(found) == shown
    assert ("more, in the job's summary" in found[-1]) == (count > shown)


def test_what_could_not_be_judged_goes_before_every_figure():
    """A limit that nothing checked may hide any size."""
    blind = judge("t.py::blind", record(0), [limit_from_marker("flat_per_batch", (), {})])
    first, second = commands(Report({}, (result("t.py::huge", 2**40), blind)))
    assert "t.py::blind" in first
    assert "t.py::huge" in second


def test_an_expected_breach_is_no_error():
    """It was marked so beforehand."""
    expected = replace(result("t.py::test_it", 5), outcome="xfailed")
    assert commands(Report({}, (expected,))) == []


def test_what_is_not_judged_is_a_warning():
    """Once for a reason, with how often; a failed test's own failure says enough."""
    unjudged = [result(f"t.py::test_{n}", 0, "max_reserved_mb", (1,)) for n in range(3)]
    left = result("t.py::left", 0, completed=False)
    report = Report({}, (*unjudged, left), missing=("t.py::lost",), unmeasured={"odd items": 2})
    assert commands(report) == [
        "::warning title=max_reserved_mb(1) not judged::this device has no reserve (3 regions)",
        "::warning title=memory not judged::t.py::left r: an exception left it; write its 'with' "
        "around what catches the exception",
        "::warning title=memory not measured::2 tests: odd items",
        "::warning title=memory%3A 1 test without a result::t.py::lost",
    ]


def test_a_failed_gate_is_an_error_and_heads_the_summary():
    """What failed the session beyond its tests has no line, and comes first."""
    report = Report({}, (), problems=("0 regions measured, --cka-memory-min-regions=1",))
    assert commands(report) == [
        "::error title=memory gate failed::0 regions measured, --cka-memory-min-regions=1"
    ]
    assert "\n**FAILED**: " in github.job_summary(report)


@pytest.mark.parametrize(
    ("choice", "environment", "reports"),
    [
        ("auto", {"GITHUB_ACTIONS": "true"}, True),
        ("auto", {"GITHUB_ACTIONS": "false"}, False),
        ("auto", {}, False),
        ("yes", {}, True),
        ("no", {"GITHUB_ACTIONS": "true"}, False),
    ],
)
def test_when_there_is_a_step_to_report_to(choice, environment, reports):
    """By default on GitHub Actions, elsewhere where asked, and nowhere where refused."""
    assert (step_of(choice, environment, Path("/r")) is not None) == reports


@pytest.mark.parametrize(
    ("root", "file", "path"),
    [
        ("/w/repo", "tests/t.py", "tests/t.py"),
        ("/w/repo/sub", "tests/t.py", "sub/tests/t.py"),
        ("/w/repo/sub", "../t.py", "t.py"),
        ("/w/other", "t.py", None),
    ],
    ids=["root", "subfolder", "above", "outside"],
)
def test_files_are_named_from_the_root_of_the_repository(root, file, path):
    """Pytest names them from its own root, which may lie deeper."""
    assert Step(None, Path("/w/repo"), Path(root), asked_for=False).path_of(file) == path
