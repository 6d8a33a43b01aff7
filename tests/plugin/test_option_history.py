"""``--cka-memory-history``: each session adds a line with the commit that was checked out."""

import json
import shutil
import subprocess

import pytest

HISTORY = "--cka-memory-history=history.jsonl"
TEST = "def test_it(cka_memory, meter): meter.free(meter.allocate({}))"


@pytest.fixture
def git(pytester):
    """Run git in the folder of the inner session, which is a repository."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def run(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=pytester.path, capture_output=True, check=True)
        return done.stdout.decode().strip()

    run("init", "-q")
    return run


def test_each_session_adds_a_line_with_its_commit(scripted, pytester, git):
    """Each session adds a line with its commit; its own growth does not count as a change."""
    pytest.importorskip("xdist")
    path = pytester.path / "history.jsonl"
    pytester.makepyfile(test_it=TEST.format(1000))
    path.touch()
    git("add", "-A")
    git("commit", "-qm", "one")
    first = git("rev-parse", "HEAD")
    run = scripted(None, HISTORY)
    run.assert_outcomes(passed=1)
    assert f"history in {path}" in run.text
    assert f"history: 1 region of {first[:10]} added to {path}" in run.text
    scripted(None, HISTORY)
    run = scripted(TEST.format(2000), HISTORY, "-n1")  # the controller writes the line
    assert f"history: 1 region of {first[:10]} with uncommitted changes added" in run.text
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["commit"] for line in lines] == [first] * 3
    assert [line["uncommitted"] for line in lines] == [False, False, True]
    sizes = [line["devices"][0]["regions"][0]["figures"]["peak_increase_bytes"] for line in lines]
    assert sizes == [1000, 1000, 2000]


def test_session_outside_a_repository_has_no_commit(scripted, pytester, monkeypatch):
    """Outside of a repository, or without git, a line has no commit; the ini key works too."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(pytester.path.parent))
    pytester.makeini("[pytest]\ncka_memory_history = kept/h.jsonl")
    scripted(TEST.format(1)).assert_outcomes(passed=1)
    (line,) = (pytester.path / "kept" / "h.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["commit"] is None


def test_broken_history_ends_the_session_before_any_test(scripted, pytester):
    """A file that is not a history is refused before any test, and nothing is added to it."""
    path = pytester.path / "history.jsonl"
    path.write_text("notes of my own\n", "utf-8")
    run = scripted(TEST.format(1), HISTORY)
    run.assert_refused(f"--cka-memory-history: cannot use {path}, line 1: not valid JSON")
    assert path.read_text("utf-8") == "notes of my own\n"
