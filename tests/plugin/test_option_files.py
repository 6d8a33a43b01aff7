"""``--cka-memory-markdown`` and ``--cka-memory-html``: the session as Markdown and HTML files."""

import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from pytest_cka_memory.cli.main import main
from pytest_cka_memory.reports import markdown
from pytest_cka_memory.reports.html import page as html_page
from pytest_cka_memory.stored import json_report as json_reader
from pytest_cka_memory.stored.json_report import report_schema

SOURCE = """
import pytest

@pytest.mark.zero_retention
@pytest.mark.parametrize("name", ["<b>|`", "plain"])
def test_leaks(cka_memory, meter, name):
    with cka_memory.measure(name) as region:
        for _ in range(6):
            meter.allocate(1)
            region.batch_done(4)

def test_whole(cka_memory, meter): meter.allocate(5)
"""
FILES = ("--cka-memory-markdown=out/r.md", "--cka-memory-html=out/r.html")


def test_all_files_report_the_same_session(scripted, pytester, worker):
    """All files have the same session: Markdown and HTML can be written again from the JSON."""
    run = scripted(SOURCE, *FILES, *worker)
    run.assert_outcomes(passed=1, failed=2)
    report = json_reader.read(pytester.path / "r.json")
    assert [result.record.label for result in report.results] == ["<b>|`", "plain", ""]
    assert (pytester.path / "out" / "r.md").read_text("utf-8") == markdown.render(report)
    assert (pytester.path / "out" / "r.html").read_text("utf-8") == html_page.render(report)
    for name in ("r.json", "r.md", "r.html"):
        run.result.stdout.fnmatch_lines([f"figures written to *{name}"])


def test_json_report_conforms_to_the_schema(scripted_reserve):
    """The JSON report of a session with every kind of result conforms to the schema."""
    source = SOURCE + "\n@pytest.mark.flat_per_batch\ndef test_unseen(meter): pass\n"
    run = scripted_reserve(source, "--cka-memory-explain")
    assert len(run.regions) == 4
    Draft202012Validator(report_schema()).validate(run.report)


def test_show_prints_the_table_of_the_session(scripted, pytester, capsys):
    """``show`` prints the table of the session from the JSON file alone."""
    run = scripted(SOURCE, "--cka-memory-report")
    capsys.readouterr()
    assert main(["show", str(pytester.path / "r.json")]) == 0
    shown = capsys.readouterr().out.splitlines()
    printed = run.result.outlines
    start = printed.index(shown[0])
    assert printed[start : start + len(shown)] == shown


def test_files_say_that_nothing_was_measured(scripted, pytester):
    """If nothing was measured, each file says so, and why the session failed."""
    run = scripted("def test_it(): pass", *FILES, "--cka-memory-min-regions=1")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    first, _, second, *_ = (pytester.path / "out" / "r.md").read_text("utf-8").splitlines()
    assert first == "### Memory: nothing was measured"
    reason = (
        "0 regions measured, but --cka-memory-min-regions=1; look for skipped or deselected tests"
    )
    assert second == f"**FAILED**: `{reason}, or lower the minimum`"
    page = (pytester.path / "out" / "r.html").read_text("utf-8")
    assert f"FAILED: {reason}" in page


@pytest.mark.parametrize("kind", ["markdown", "html"])
def test_paths_in_the_ini_file_are_relative_to_it(scripted, pytester, kind):
    """A path in the ini file is relative to the folder of that file."""
    pytester.makeini(f"[pytest]\ncka_memory_{kind} = out/r\n")
    scripted("def test_it(cka_memory): pass").assert_outcomes(passed=1)
    assert (pytester.path / "out" / "r").is_file()


@pytest.mark.parametrize("kind", ["markdown", "html"])
def test_path_that_cannot_be_written_is_refused_before_any_test(scripted, pytester, kind):
    """A report's path that cannot be written is refused with its option before any test."""
    (pytester.path / "a_file").touch()
    run = scripted(SOURCE, f"--cka-memory-{kind}=a_file/r", writes_json=False)
    run.assert_refused(f"--cka-memory-{kind}: cannot write ")


def test_other_files_are_written_if_one_cannot_be(scripted, pytester):
    """If one file cannot be written, the others are; the session fails and names it."""
    source = """
        import pathlib
        def test_it(cka_memory):
            pathlib.Path("lost").rmdir()
            pathlib.Path("lost").touch()
        """
    run = scripted(source, "--cka-memory-markdown=lost/r.md", "--cka-memory-html=r.html")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert run.report is not None
    assert Path(pytester.path, "r.html").is_file()
    run.result.stdout.fnmatch_lines(["FAILED: cannot write *r.md: *"])
    assert len(re.findall("figures written to", run.text)) == 2


@pytest.mark.parametrize("kind", ["json", "markdown", "html", "baseline", "snapshots"])
def test_unknown_users_home_folder_is_refused(scripted, kind):
    """A path with the home folder of an unknown user is refused with the option's name."""
    path = f"--cka-memory-{kind}=~nosuchuser/x"
    run = scripted(SOURCE, path, writes_json=False)
    run.assert_refused(f"--cka-memory-{kind}: '~nosuchuser/x' names the home folder of a user")


@pytest.mark.parametrize("kind", ["json", "baseline"])
def test_name_that_is_too_long_is_refused(scripted, kind):
    """A file name of more than the system's 255 bytes is refused."""
    run = scripted(SOURCE, f"--cka-memory-{kind}={'n' * 300}", writes_json=False)
    run.assert_refused(f"--cka-memory-{kind}: ", "File name too long")


def test_name_with_a_null_byte_is_refused(scripted):
    """A configuration file can have a name that no file may have."""
    run = scripted(SOURCE, "-o", "cka_memory_json=a\0b", writes_json=False)
    run.assert_refused("cka_memory_json in the configuration: cannot use", "embedded null")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--cka-memory-html=r.json"], "json and --cka-memory-html"),
        (["--cka-memory-html=./inner/../r.json"], "json and --cka-memory-html"),
        (["--cka-memory-markdown=o", "--cka-memory-html=o"], "markdown and --cka-memory-html"),
        (["--cka-memory-baseline=r.json", "--cka-memory-update-baseline"], "json and --cka-mem"),
    ],
    ids=["two-reports", "written-differently", "neither-is-json", "baseline"],
)  # fmt: skip
def test_two_outputs_of_one_path_are_refused(scripted, pytester, options, named):
    """Two outputs with one path are refused, because the last would overwrite the first."""
    run = scripted(SOURCE, *options)
    run.assert_refused(f"--cka-memory-{named}", "so one would overwrite the other")
    assert not (pytester.path / "r.json").exists()


def test_two_reports_may_be_thrown_away(scripted):
    """Two reports may go to /dev/null, which neither of them overwrites."""
    run = scripted(
        "def test_it(cka_memory): pass",
        "--cka-memory-json=/dev/null",
        "--cka-memory-html=/dev/null",
        writes_json=False,
    )
    run.assert_outcomes(passed=1)
