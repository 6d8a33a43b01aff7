"""``--cka-memory-markdown`` and ``--cka-memory-html``: the same session, in files of their own."""

import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from pytest_cka_memory.cli import main
from pytest_cka_memory.reports import markdown
from pytest_cka_memory.reports.html import page as html_page
from pytest_cka_memory.reports.json import reader as json_reader
from pytest_cka_memory.reports.json import writer as json_writer

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


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "xdist"])
def test_every_file_tells_of_the_same_session(scripted, pytester, workers):
    """What the JSON report holds, the others show; whoever has it can make them again."""
    run = scripted(SOURCE, *FILES, *workers)
    run.outcomes(passed=1, failed=2)
    report = json_reader.read(pytester.path / "r.json")
    assert [result.record.label for result in report.results] == ["<b>|`", "plain", ""]
    assert (pytester.path / "out" / "r.md").read_text("utf-8") == markdown.text(report)
    assert (pytester.path / "out" / "r.html").read_text("utf-8") == html_page.text(report)
    for name in ("r.json", "r.md", "r.html"):
        run.result.stdout.fnmatch_lines([f"figures written to *{name}"])


def test_a_real_report_keeps_to_the_schema(scripted_reserve):
    """With a reserve, batches, breaches, and a limit that no batch could be judged by."""
    source = SOURCE + "\n@pytest.mark.flat_per_batch\ndef test_unseen(meter): pass\n"
    run = scripted_reserve(source, "--cka-memory-explain")
    assert len(run.regions) == 4
    schema = json_writer.SCHEMA_FILE.read_text(encoding="utf-8")
    Draft202012Validator(json_reader.json.loads(schema)).validate(run.report)


def test_the_shell_shows_what_the_session_printed(scripted, pytester, capsys):
    """The same table, line by line, from the file alone."""
    run = scripted(SOURCE, "--cka-memory-report")
    capsys.readouterr()
    assert main(["show", str(pytester.path / "r.json")]) == 0
    shown = capsys.readouterr().out.splitlines()
    printed = run.result.outlines
    start = printed.index(shown[0])
    assert printed[start : start + len(shown)] == shown


def test_the_markdown_of_a_session_that_measured_nothing_says_so(scripted, pytester):
    """And what failed it, if a gate did."""
    run = scripted("def test_it(): pass", *FILES, "--cka-memory-min-regions=1")
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    first, _, second, *_ = (pytester.path / "out" / "r.md").read_text("utf-8").splitlines()
    assert first == "### Memory: nothing was measured"
    assert second == "**FAILED**: `0 regions measured, --cka-memory-min-regions=1`"
    page = (pytester.path / "out" / "r.html").read_text("utf-8")
    assert "FAILED: 0 regions measured, --cka-memory-min-regions=1" in page


@pytest.mark.parametrize("kind", ["markdown", "html"])
def test_paths_in_the_ini_file_start_there(scripted, pytester, kind):
    """As those of every file."""
    pytester.makeini(f"[pytest]\ncka_memory_{kind} = out/r\n")
    scripted("def test_it(cka_memory): pass").outcomes(passed=1)
    assert (pytester.path / "out" / "r").is_file()


@pytest.mark.parametrize("kind", ["markdown", "html"])
def test_a_place_that_cannot_be_written_is_refused_at_once(scripted, pytester, kind):
    """Before any test has run, by the option's name."""
    (pytester.path / "a_file").touch()
    run = scripted(SOURCE, f"--cka-memory-{kind}=a_file/r", writes_json=False)
    run.refused(f"--cka-memory-{kind}: cannot write ")


def test_a_file_that_fails_keeps_none_of_the_others(scripted, pytester):
    """Each is written for itself; the session fails and says which was not."""
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
