"""The workflow of the page on two branches runs, step by step, on a merge of its two branches."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_processes
import pytest
from docs_pages import ROOT, Block, blocks, commands
from docs_session import git
from test_tutorial import WORKFLOW as OF_THE_TUTORIAL
from test_tutorial import steps

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the steps need bash")
PAGE = blocks(ROOT / "docs" / "how-to" / "branches.md")
FILE = ".github/workflows/branches.yml"
(WHOLE,) = (yaml.safe_load(block.text) for block in PAGE if block.note == f"file: {FILE}")
WITH_ACTION, COMMENT = (
    yaml.safe_load(block.text) for block in PAGE if block.note.startswith("checked by: ")
)
(JOB,) = WHOLE["jobs"].values()
CHECKOUT, *SET_UP, BASE, NEW, COMPARE = JOB["steps"]
ACTION = yaml.safe_load(
    (ROOT / ".github" / "actions" / "memory-gate" / "action.yml").read_text("utf-8")
)
RECORDER = '#!/bin/sh\nfor each in "$@"; do echo "$each" >> "$CALLS"; done\n'


class Runner:
    """A clone of the pull request's merge, as shallow as the workflow asks for, and its folders."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.temporary = folder / "checkout", folder / "temporary"
        self.summary, self.calls = folder / "summary.md", folder / "calls"
        programs = folder / "programs"
        for made in (self.temporary, programs):
            made.mkdir()
        for name, text in (
            ("python", f'#!/bin/sh\nexec {shlex.quote(forked_processes.interpreter())} "$@"\n'),
            ("gh", RECORDER),
        ):
            (programs / name).write_text(text, "utf-8")
            (programs / name).chmod(0o755)
        self._path = f"{programs}:{os.environ['PATH']}"

    def run(self, step: dict[str, Any], **given: str) -> subprocess.CompletedProcess[str]:
        """Run the script of a step as GitHub does that names no shell."""
        return subprocess.run(
            ["bash", "-e", "-c", step["run"]],
            cwd=self.checkout,
            env={
                **os.environ,
                "PATH": self._path,
                "GITHUB_ACTIONS": "true",
                "GITHUB_STEP_SUMMARY": str(self.summary),
                "GITHUB_WORKSPACE": str(self.checkout),
                "RUNNER_TEMP": str(self.temporary),
                "CALLS": str(self.calls),
                **given,
            },
            capture_output=True,
            text=True,
            check=False,
        )


def done(*words: str, folder: Path) -> None:
    """Run git, which must succeed."""
    status, printed = git(*words, folder=folder)
    assert status == 0, printed


def write(found: list[Block], folder: Path) -> None:
    """Write the files of these blocks; a later one replaces an earlier one of the same name."""
    for block in found:
        if block.note.startswith("file: "):
            file = folder / block.note.removeprefix("file: ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, "utf-8")


@pytest.fixture(params=["more memory", "the same code"])
def runner(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Runner:
    """The repository of the page, whose main branch has one more commit than the other one has."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")
    repository = tmp_path / "repository"
    repository.mkdir()
    first_commit = next(n for n, block in enumerate(PAGE) if "git init" in block.text)
    done("init", "--initial-branch=main", folder=repository)
    done("config", "user.name", "You", folder=repository)
    done("config", "user.email", "you@example.org", folder=repository)
    write(PAGE[:first_commit], repository)
    done("add", ".", folder=repository)
    done("commit", "-m", "one", folder=repository)
    done("switch", "-c", "simpler", folder=repository)
    if request.param == "more memory":
        write(PAGE[first_commit:], repository)
    done("commit", "-a", "--allow-empty", "-m", "two", folder=repository)
    done("switch", "main", folder=repository)
    (repository / "LICENSE").write_text("none\n", "utf-8")
    done("add", ".", folder=repository)
    done("commit", "-m", "three", folder=repository)
    done("merge", "--no-ff", "simpler", folder=repository)
    runner = Runner(tmp_path)
    depth = f"--depth={CHECKOUT['with']['fetch-depth']}"
    done("clone", depth, f"file://{repository}", str(runner.checkout), folder=tmp_path)
    return runner


@pytest.mark.slow
def test_steps_fail_the_pull_request_that_needs_more_memory_and_no_other(
    runner: Runner, request: pytest.FixtureRequest
) -> None:
    """The steps measure both branches, and the last one has the status of the comparison."""
    rises = "more memory" in request.node.name
    for step in (BASE, NEW):
        ended = runner.run(step)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (runner.temporary / "base" / "LICENSE").exists()  # of the newest commit of main
    compared = runner.run(COMPARE)
    assert compared.returncode == int(rises), compared.stdout + compared.stderr
    assert ("REGRESSION" in compared.stdout) is rises
    assert ("::error title=memory::" in compared.stdout) is rises
    report, table = runner.summary.read_text("utf-8").split("### ")[1:]
    assert "test_points.py::test_nearest" in report
    assert "1 of 1 region rose" in table or not rises
    (comment,) = COMMENT["steps"]
    ended = runner.run(comment, NUMBER="7", GH_TOKEN="")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *words, file = runner.calls.read_text("utf-8").splitlines()
    assert words == ["pr", "comment", "7", "--edit-last", "--create-if-none", "--body-file"]
    assert Path(file).read_text("utf-8") == f"### {table}"


@pytest.mark.slow
def test_comparison_without_a_report_of_the_base_branch_fails_with_status_2(
    runner: Runner,
) -> None:
    """The page says that a base branch without tests has no report."""
    assert runner.run(NEW).returncode == 0
    compared = runner.run(COMPARE)
    assert compared.returncode == 2, compared.stdout + compared.stderr
    assert "base.json" in compared.stderr


def test_workflow_runs_the_commands_that_the_page_has_run() -> None:
    """The steps differ from the page's commands in the folder of the reports alone."""
    run = [
        command
        for block in PAGE
        if block.language == "sh"
        for command in commands(block)
        if command.startswith(("python", "git worktree add"))
    ]
    shown = [line for step in (BASE, NEW, COMPARE) for line in step["run"].splitlines()]

    def plain(command: str) -> str:
        for old, new in (
            ('"$RUNNER_TEMP/base"', "../base"),
            ('"$RUNNER_TEMP/base.json"', "../base.json"),
            ('"$RUNNER_TEMP/new.json"', "../new.json"),
            ("compare base.json new.json", "compare ../base.json ../new.json"),
            (" --cka-memory-github=no", ""),
            ("HEAD^1", "main"),
        ):
            command = command.replace(old, new)
        return command.removesuffix(" || {")

    assert run
    assert [command for command in run if command not in map(plain, shown)] == []


def test_set_up_of_the_workflow_is_that_of_the_tutorial() -> None:
    """The page refers to the tutorial for the requirements file, and pins the same actions."""
    _, *expected = steps(OF_THE_TUTORIAL)[: 1 + len(SET_UP)]
    assert expected == SET_UP
    assert CHECKOUT["uses"] in OF_THE_TUTORIAL
    assert WHOLE["permissions"] == {"contents": "read"}


def test_scripts_of_the_page_contain_no_expressions() -> None:
    """A script with an expression could run what a pull request's author has written."""
    scripts = [step["run"] for step in (*JOB["steps"], *COMMENT["steps"]) if "run" in step]
    assert [script for script in scripts if "${{" in script] == []


def test_action_compares_with_the_report_that_the_step_before_it_writes() -> None:
    """The action is given inputs that it has, and the file of the base branch."""
    (step,) = WITH_ACTION
    assert step["uses"] == "OWNER/pytest-cka-memory/.github/actions/memory-gate@COMMIT"
    assert set(step["with"]) <= set(ACTION["inputs"])
    path = step["with"]["compare-with"].replace("${{ runner.temp }}", "$RUNNER_TEMP")
    assert f'--cka-memory-json="{path}"' in BASE["run"]
    assert step["with"]["every-test"] == "true"
