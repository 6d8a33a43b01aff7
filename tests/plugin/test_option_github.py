"""--cka-memory-github: annotations and the job's summary, by default on GitHub Actions."""

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
def job(scripted, pytester, monkeypatch):
    """Run tests as a step of a job would; returns the session and what its summary has."""
    summary = pytester.path / "summary.md"

    def run(source, *args, **environment):
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
        monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        session = scripted(source, *args, writes_json=False)
        return session, summary.read_text("utf-8") if summary.exists() else ""

    return run


def _commands(session):
    return [line for line in session.text.splitlines() if line.startswith(("::error", "::warn"))]


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "parallel"])
def test_a_breach_is_annotated_once_where_its_test_stands(job, workers):
    """From its markers on; the Markdown report is in the summary, and no option asked for it."""
    session, summary = job(TESTS, *workers)
    session.outcomes(passed=2, failed=1)
    (command,) = _commands(session)
    start = "::error file=test_it.py,line=6,title=max_retained_mb('4 B') broken::"
    assert command.startswith(
        f"{start}test_it.py::test_it[5]: retained 5 bytes, allowed 4 bytes: 1 byte too much%0A"
    )
    assert summary.count("### Memory: 1 of 2 regions broke a limit") == 1
    assert "report added to the job's summary" in session.text


def test_files_are_named_from_the_repository(job, pytester):
    """The tests of a project in a subfolder are found, whatever pytest's root is."""
    session, _ = job(TESTS, GITHUB_WORKSPACE=str(pytester.path.parent))
    (command,) = _commands(session)
    assert command.startswith(f"::error file={pytester.path.name}/test_it.py,line=6,")


def test_an_earlier_summary_stays(job, pytester):
    """Steps and programs share it: it is appended to."""
    (pytester.path / "summary.md").write_text("# mine\n\n", "utf-8")
    _, summary = job(TESTS)
    assert summary.startswith("# mine\n\n### Memory: ")


@pytest.mark.parametrize("source", ["def test_it(): pass", ""], ids=["unmarked", "empty"])
def test_a_session_that_measures_nothing_leaves_no_trace(job, source):
    """Whoever only has the plugin installed sees nothing of it."""
    session, summary = job(source)
    assert summary == ""
    assert _commands(session) == []
    assert "cka-memory ==" not in session.text


def test_kept_limits_leave_a_summary_and_no_annotation(job):
    """A green gate shows its figures."""
    session, summary = job(TESTS, "-k", "3 or unmarked")
    session.outcomes(passed=2)
    assert _commands(session) == []
    assert "### Memory: 1 region kept every limit" in summary


@pytest.mark.parametrize("by", ["option", "ini"])
def test_it_can_be_turned_off(job, pytester, by):
    """On GitHub Actions too."""
    if by == "ini":
        pytester.makeini("[pytest]\ncka_memory_github = no\n")
    session, summary = job(TESTS, *(["--cka-memory-github=no"] if by == "option" else []))
    assert (_commands(session), summary) == ([], "")


@pytest.mark.parametrize("by", ["option", "ini"])
def test_elsewhere_it_can_be_asked_for(scripted, pytester, by):
    """Annotations are printed; where no job has a summary, none is written."""
    if by == "ini":
        pytester.makeini("[pytest]\ncka_memory_github = yes\n")
    session = scripted(TESTS, *(["--cka-memory-github=yes"] if by == "option" else []))
    assert len(_commands(session)) == 1
    assert "job's summary" not in session.text


def test_elsewhere_nothing_is_printed(scripted):
    """No command in a log that nobody reads them from."""
    assert _commands(scripted(TESTS)) == []


def test_a_choice_there_is_not_is_refused(scripted):
    """With those there are."""
    scripted(TESTS, "--cka-memory-github=maybe").refused(
        "--cka-memory-github: 'maybe' is none of auto, yes, no"
    )


def test_a_summary_that_cannot_be_written_fails_only_where_it_was_asked_for(job, pytester):
    """By default a broken runner is told, and the tests decide."""
    lost = str(pytester.path / "no" / "such" / "folder")
    session, _ = job(TESTS, "-k", "3", GITHUB_STEP_SUMMARY=lost)
    assert session.result.ret == pytest.ExitCode.OK
    session.result.stdout.fnmatch_lines(["not added to the job's summary: cannot write *folder*"])
    session, _ = job(TESTS, "-k", "3", "--cka-memory-github=yes", GITHUB_STEP_SUMMARY=lost)
    assert session.result.ret == pytest.ExitCode.TESTS_FAILED
    session.result.stdout.fnmatch_lines(["FAILED: cannot write *folder*"])


def test_a_summary_beyond_githubs_limit_is_left_alone(job, pytester):
    """GitHub would drop all of it, what others wrote included."""
    (pytester.path / "summary.md").write_text("x" * (2**20 - 100), "utf-8")
    session, summary = job(TESTS)
    assert len(summary) == 2**20 - 100
    session.result.stdout.fnmatch_lines(["not added to the job's summary: *1 MiB"])


def test_a_failed_gate_is_annotated(job):
    """No test is to blame, and yet the pull request shows why the job is red."""
    session, summary = job("def test_it(): pass", "--cka-memory-min-regions=1")
    assert session.result.ret == pytest.ExitCode.TESTS_FAILED
    problem = "0 regions measured, --cka-memory-min-regions=1"
    assert _commands(session) == [f"::error title=memory gate failed::{problem}"]
    assert problem in summary


def test_a_place_that_is_lost_meanwhile_is_annotated(job, pytester):
    """What another output could not write is in the annotations, too."""
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
def test_annotations_are_printed_whatever_the_terminal_shows(job, options):
    """Each on a line of its own, which alone the runner reads."""
    session, _ = job(TESTS, *options)
    assert len(_commands(session)) == 1


def test_rerun_tests_are_annotated_once(job):
    """With pytest-rerunfailures only the run that counts is told."""
    pytest.importorskip("pytest_rerunfailures")
    session, _ = job(TESTS, "--reruns=2")
    assert len(_commands(session)) == 1
