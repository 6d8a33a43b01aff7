"""Workflow commands for GitHub Actions are escaped, limited in number and sorted."""

from dataclasses import replace
from pathlib import Path

import pytest
from reports_made import record

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.retention import Holding, Sample
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.integrations.github import JobStep, step_of
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.reports import markdown


def result(nodeid, retained, marker="zero_retention", args=(), completed=True):
    """Judge a region labelled `r` by one limit."""
    measured = record("r", retained_bytes=retained, batches=0, completed=completed)
    return judge(nodeid, measured, [limit_from_marker(marker, args, {})])


def commands(report):
    return markdown.annotations(report, lambda file: file)


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
def test_text_is_escaped_for_workflow_commands(message, title, line):
    """In GitHub's commands, percent signs and line ends are escaped; colons and commas, in
    properties.
    """
    assert markdown.command("error", message, title=title) == line


def test_breach_is_reported_at_the_line_of_its_test():
    """A command for a breach has its file and line, the limit, the region and the figure."""
    broken = result("tests/test_a.py::test_it", 5)
    report = Report({}, (broken,), locations={broken.nodeid: ("tests/test_a.py", 12)})
    (command,) = commands(report)
    assert command.startswith(
        "::error file=tests/test_a.py,line=12,title=zero_retention broken::"
        "tests/test_a.py::test_it r: retained 5 bytes, allowed 0 bytes: 5 bytes too much%0A"
    )


def growing(hints, garbage=()):
    """Return the lines of the annotation about a loop that grows, with a group for each hint."""
    groups = tuple(
        Holding(
            bytes=900 - number,
            count=1,
            bytes_per_batch=300 / len(hints),
            created_at=(f"net.py:{number} in f",),
            held_by=f"net.x{number}",
            hint=hint,
        )
        for number, hint in enumerate(hints)
    )
    left_bytes = sum(holding.bytes for holding in garbage)
    levels = (Sample(n, 64, n * 300, n * 300, n * 300, left_bytes) for n in range(1, 10))
    measured = record("r", timeline=tuple(levels), grown=groups, garbage=garbage)
    broken = judge("t.py::test_it", measured, [limit_from_marker("flat_per_batch", (), {})])
    (command,) = commands(Report({}, (broken,)))
    return command.split("%0A")[1:]


def test_long_explanation_has_whole_groups_and_ends_with_the_share_of_all():
    """What does not fit is left out from the end, and a line says that there is more."""
    lines = growing([f"free it {number}" for number in range(6)])
    assert [line.strip() for line in lines[-3:]] == [
        *("what to do: free it 2", "and more, in the message of the test"),
        "explains 300 of 300 B per batch",
    ]
    assert len(lines) == 1 + 3 * 4 + 2


def test_largest_cause_is_whole_however_long_it_is():
    lines = growing([" ".join(["free it"] * 200)])
    assert len(lines) > 20
    assert lines[-1].startswith("  explains ")


def test_garbage_follows_what_a_loop_grows_by():
    """It is not counted as growth, and a reader takes what comes first for the cause."""
    left = Holding(bytes=4000, count=1, held_by="Node.x, in the cycle Node.me", hint="break it")
    lines = growing(["free it"], garbage=(left,))
    assert [line.strip() for line in lines[4:]] == [
        *("what to do: free it", "explains 300 of 300 B per batch"),
        *("garbage in reference cycles, not counted:", "1 tensor, 4,000 bytes"),
        *("held by Node.x, in the cycle Node.me", "what to do: break it"),
    ]


def test_breach_outside_the_repository_is_reported_without_a_file():
    """A breach outside the repository has no file, because GitHub would not show its command."""
    broken = result("t.py::test_it", 5)
    report = Report({}, (broken,), locations={broken.nodeid: ("../t.py", 12)})
    (command,) = markdown.annotations(report, lambda file: None)
    assert command.startswith("::error title=zero_retention broken::t.py::test_it r: ")


def test_largest_breaches_come_first_and_the_rest_are_counted():
    """GitHub shows ten commands: the nine largest breaches, and the number of the others."""
    report = Report({}, tuple(result(f"t.py::test_{n}", n + 1) for n in range(30)))
    found = commands(report)
    assert len(found) == markdown.MOST_PER_KIND
    assert [f"::t.py::test_{29 - n} " in command for n, command in enumerate(found[:9])] == [
        True
    ] * 9
    assert found[9] == "::error title=memory::and 21 more, in the job's summary"


def test_every_failing_test_has_an_annotation_before_any_has_a_second():
    """Of 13 breaches in 5 tests, all tests have an annotation, though one has the largest nine."""
    large = tuple(result("t.py::test_large", 100 + n) for n in range(9))
    small = tuple(result(f"t.py::test_{n}", n + 1) for n in range(4))
    found = commands(Report({}, (*large, *small)))
    assert len(found) == markdown.MOST_PER_KIND
    assert [command.split("::")[3].split()[0] for command in found[:5]] == [
        *("test_large", "test_3", "test_2", "test_1", "test_0")
    ]
    assert found[9] == "::error title=memory::and 4 more, in the job's summary"


@pytest.mark.parametrize(("count", "shown"), [(10, 10), (11, 10)], ids=["ten", "eleven"])
def test_ten_breaches_are_all_shown(count, shown):
    """Ten breaches have an annotation each; of more, nine have one
    and the tenth counts the others.
    """
    found = commands(Report({}, tuple(result(f"t.py::test_{n}", 1) for n in range(count))))
    assert len(found) == shown
    assert ("more, in the job's summary" in found[-1]) == (count > shown)


def test_limit_that_could_not_be_judged_comes_before_other_breaches():
    """Annotations begin with limits that could not be judged, which
    may hide a breach of any size.
    """
    blind = judge(
        "t.py::blind", record("r", batches=0), [limit_from_marker("flat_per_batch", (), {})]
    )
    first, second = commands(Report({}, (result("t.py::huge", 2**40), blind)))
    assert "t.py::blind" in first
    assert "t.py::huge" in second


def test_breach_of_an_xfailed_test_is_not_reported():
    """A breach of a test that is marked with xfail is not reported."""
    expected = replace(result("t.py::test_it", 5), outcome="xfailed")
    assert commands(Report({}, (expected,))) == []


def test_regions_that_are_not_judged_are_warnings():
    """For each reason not to judge there is one warning, with the number of its regions."""
    unjudged = [result(f"t.py::test_{n}", 0, "max_reserved_mb", (1,)) for n in range(3)]
    left = result("t.py::left", 0, completed=False)
    report = Report({}, (*unjudged, left), missing=("t.py::lost",), unmeasured={"odd items": 2})
    assert commands(report) == [
        "::warning title=max_reserved_mb(1) not judged::this device has no reserve (3 regions)",
        "::warning title=memory not judged::t.py::left r: an exception left the region's "
        "'with' block; put the block around the code that catches the exception",
        "::warning title=memory not measured::2 tests: odd items",
        "::warning title=memory%3A 1 test without a result::t.py::lost",
    ]


def test_failed_session_is_an_error_and_comes_first_in_the_summary():
    """The error of a failed session has no file, and comes first in the job's summary."""
    report = Report({}, (), problems=("0 regions measured, --cka-memory-min-regions=1",))
    assert commands(report) == [
        "::error title=memory gate failed::0 regions measured, --cka-memory-min-regions=1"
    ]
    assert "\n**FAILED**: " in markdown.render(report, markdown.JOB_SUMMARY_CHARACTERS)


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
def test_auto_reports_only_on_github_actions(choice, environment, reports):
    """``auto`` reports only on GitHub Actions, ``yes`` always and ``no`` never."""
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
def test_file_paths_start_at_the_root_of_the_repository(root, file, path):
    """Annotations have paths from the repository's root, of which pytest's may be a subfolder."""
    assert JobStep(None, Path("/w/repo"), Path(root), asked_for=False).path_of(file) == path
