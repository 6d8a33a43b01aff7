"""``--cka-memory-github``: annotations and the job's summary, on by default in GitHub Actions."""

import pytest

TESTS = """
import pytest

KEPT = []


@pytest.mark.max_retained_mb("4 B")
@pytest.mark.parametrize("size", [3, 5])
def test_it(meter, size):
    meter.allocate(size)


def test_unmarked(): pass
"""


@pytest.fixture
def job(scripted, job_summary, monkeypatch):
    """Run tests as a step of a job does; return the session and the text of the job's summary."""

    def run(source, *args, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        session = scripted(source, *args, writes_json=False)
        return session, job_summary.read_text("utf-8") if job_summary.exists() else ""

    return run


def _commands(session):
    return [line for line in session.text.splitlines() if line.startswith(("::error", "::warn"))]


def test_breach_is_annotated_once_at_its_test(job, worker):
    """A breach is annotated at its test's first marker, and the summary gets the report."""
    session, summary = job(TESTS, *worker)
    session.assert_outcomes(passed=2, failed=1)
    (command,) = _commands(session)
    start = "::error file=test_it.py,line=6,title=max_retained_mb('4 B') broken::"
    assert command.startswith(
        f"{start}test_it.py::test_it[5]: retained 5 bytes, allowed 4 bytes: 1 byte too much%0A"
    )
    assert summary.count("### Memory: 1 of 2 regions broke a limit") == 1
    assert "report added to the job's summary" in session.text


def test_annotations_name_files_relative_to_the_repository(job, pytester):
    """Tests of a project in a subfolder are named by their path in the repository."""
    session, _ = job(TESTS, GITHUB_WORKSPACE=str(pytester.path.parent))
    (command,) = _commands(session)
    assert command.startswith(f"::error file={pytester.path.name}/test_it.py,line=6,")


def test_report_is_appended_to_an_earlier_summary(job, pytester):
    """The report is appended to GitHub's summary of a job, to
    which other programs write as well.
    """
    (pytester.path / "summary.md").write_text("# mine\n\n", "utf-8")
    _, summary = job(TESTS)
    assert summary.startswith("# mine\n\n### Memory: ")


@pytest.mark.parametrize("source", ["def test_it(): pass", ""], ids=["unmarked", "empty"])
def test_session_that_measures_nothing_prints_and_writes_nothing(job, source):
    """A session that measures nothing prints and writes nothing for GitHub."""
    session, summary = job(source)
    assert summary == ""
    assert _commands(session) == []
    assert "cka-memory ==" not in session.text


def test_kept_limits_give_a_summary_and_no_annotation(job):
    """A session that passed has no annotation, and figures in the summary."""
    session, summary = job(TESTS, "-k", "3 or unmarked")
    session.assert_outcomes(passed=2)
    assert _commands(session) == []
    assert "### Memory: 1 region kept every limit" in summary


@pytest.mark.parametrize("by", ["option", "ini"])
def test_it_can_be_turned_off(job, pytester, by):
    """Annotations and summary can be turned off by option or ini key."""
    if by == "ini":
        pytester.makeini("[pytest]\ncka_memory_github = no\n")
    session, summary = job(TESTS, *(["--cka-memory-github=no"] if by == "option" else []))
    assert (_commands(session), summary) == ([], "")


@pytest.mark.parametrize("by", ["option", "ini"])
def test_annotations_can_be_requested_outside_of_github(scripted, pytester, by):
    """Outside of GitHub annotations can be requested; there is no summary to write."""
    if by == "ini":
        pytester.makeini("[pytest]\ncka_memory_github = yes\n")
    session = scripted(TESTS, *(["--cka-memory-github=yes"] if by == "option" else []))
    assert len(_commands(session)) == 1
    assert "job's summary" not in session.text


def test_nothing_is_printed_outside_of_github_by_default(scripted):
    """Outside of GitHub nothing is printed by default, as only its runner reads commands."""
    assert _commands(scripted(TESTS)) == []


def test_unknown_choice_is_refused(scripted):
    """The error for an unknown choice of the option lists the valid ones."""
    scripted(TESTS, "--cka-memory-github=maybe").assert_refused(
        "--cka-memory-github: cannot use 'maybe'; write auto, yes or no"
    )


def test_unwritable_summary_fails_the_session_only_if_requested(job, pytester):
    """A summary that cannot be written fails the session only if the option asked for it."""
    lost = str(pytester.path / "no" / "such" / "folder")
    session, _ = job(TESTS, "-k", "3", GITHUB_STEP_SUMMARY=lost)
    assert session.result.ret == pytest.ExitCode.OK
    session.result.stdout.fnmatch_lines(["not added to the job's summary: cannot write *folder*"])
    session, _ = job(TESTS, "-k", "3", "--cka-memory-github=yes", GITHUB_STEP_SUMMARY=lost)
    assert session.result.ret == pytest.ExitCode.TESTS_FAILED
    session.result.stdout.fnmatch_lines(["FAILED: cannot write *folder*"])


def test_summary_is_not_extended_beyond_githubs_limit(job, pytester):
    """GitHub drops a summary that is too long, so it is not extended beyond the limit."""
    (pytester.path / "summary.md").write_text("x" * (2**20 - 100), "utf-8")
    session, summary = job(TESTS)
    assert len(summary) == 2**20 - 100
    session.result.stdout.fnmatch_lines(["not added to the job's summary: *1 MiB"])


def test_failed_minimum_of_regions_is_annotated(job):
    """Too few regions are annotated without a test, so that a pull request shows the reason."""
    session, summary = job("def test_it(): pass", "--cka-memory-min-regions=1")
    assert session.result.ret == pytest.ExitCode.TESTS_FAILED
    problem = "0 regions measured, but --cka-memory-min-regions=1"
    (command,) = _commands(session)
    assert command.startswith(f"::error title=memory gate failed::{problem}; look for ")
    assert problem in summary


def test_file_that_cannot_be_written_at_the_end_is_annotated(job, pytester):
    """A report that could not be written is named in an annotation."""
    source = "def test_it(cka_memory, pytestconfig):\n"
    source += "    (pytestconfig.rootpath / 'd').rmdir(); (pytestconfig.rootpath / 'd').touch()\n"
    session, _ = job(source, "--cka-memory-markdown=d/m.md")
    (command,) = _commands(session)
    assert command.startswith("::error title=memory gate failed::cannot write ")


@pytest.mark.parametrize(
    "options",
    [
        ["-p", "no:terminal"],
        ["-qq", "--no-summary"],
        ["-s"],
        ["--tb=no", "-rN"],
        ["-vv", "-p", "no:logging"],
    ],
    ids="_".join,
)
def test_annotations_do_not_depend_on_terminal_options(job, options):
    """GitHub's runner reads whole lines, so each annotation has one, whatever the terminal."""
    session, _ = job(TESTS, *options)
    assert len(_commands(session)) == 1


def test_rerun_tests_are_annotated_once(job):
    """A test that pytest-rerunfailures runs again is annotated for its last run only."""
    pytest.importorskip("pytest_rerunfailures")
    session, _ = job(TESTS, "--reruns=2")
    assert len(_commands(session)) == 1
