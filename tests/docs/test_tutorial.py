"""The workflow at the end of the tutorial runs what the page has installed and tried before."""

import re

import pytest
from docs_pages import ROOT, Block, blocks, commands
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from pytest_cka_memory import __version__

yaml = pytest.importorskip("yaml")
PAGE = blocks(ROOT / "docs" / "tutorial.md")


def written(name: str) -> Block:
    """Return the last block that writes a file."""
    return [block for block in PAGE if block.note == f"file: {name}"][-1]


WORKFLOW = written(".github/workflows/memory.yml").text


def steps(text: str = WORKFLOW) -> list[dict[str, object]]:
    (job,) = yaml.safe_load(text)["jobs"].values()
    found: list[dict[str, object]] = job["steps"]
    return found


def test_workflow_of_the_tutorial_runs_the_command_that_the_page_has_run() -> None:
    """The workflow runs the page's last command, which the docs
    tests run on the committed files.
    """
    installs, gate = [step["run"] for step in steps() if "run" in step]
    run = [block for block in PAGE if block.language == "sh" and not block.note]
    assert [gate] == list(commands(run[-1]))
    assert installs == "python -m pip install -r requirements-dev.txt"
    code = PAGE.index(written("training.py"))
    assert code < PAGE.index(run[-1])


def test_workflow_of_the_tutorial_keeps_the_report_that_its_command_writes() -> None:
    """The workflow uploads the report that its command writes, also if the gate has failed."""
    upload = steps()[-1]
    assert upload["if"] == "${{ !cancelled() }}"
    assert f"--cka-memory-html={upload['with']['path']}" in str(steps()[-2]["run"])  # type: ignore[index]


def test_job_of_the_tutorial_installs_what_the_page_has_installed() -> None:
    """The requirements file names the plugin's address on the page, and torch with a version."""
    torch, plugin = written("requirements-dev.txt").text.splitlines()
    installed = [command for block in PAGE if block.language == "sh" for command in commands(block)]
    assert f'python -m pip install "{plugin}"' in installed
    assert Requirement(torch).name == "torch"
    assert str(Requirement(torch).specifier).startswith("==")


def test_files_that_are_not_committed_are_those_that_the_page_makes() -> None:
    """The environment, the report of the job's command and caches are named, and no other file."""
    named = written(".gitignore").text.splitlines()
    assert f"{steps()[-1]['with']['path']}" in named  # type: ignore[index]
    assert {".venv/", "__pycache__/", ".pytest_cache/"} < set(named)
    files = {block.note.removeprefix("file: ") for block in PAGE}
    assert not files & set(named)


@pytest.mark.sources
def test_wheel_that_the_tutorial_names_is_one_that_the_build_makes() -> None:
    """The page's example of a wheel has the project's version, and the tag of setup.py."""
    (named,) = re.findall(r"`\./wheels/(\S+\.whl)`", (ROOT / "docs" / "tutorial.md").read_text())
    name, version, *_, platform = parse_wheel_filename(named)
    assert (name, str(version)) == ("pytest-cka-memory", __version__)
    assert {(tag.interpreter, tag.abi) for tag in platform} == {("py3", "none")}
    assert 'return "py3", "none", platform' in (ROOT / "setup.py").read_text("utf-8")


def test_workflow_without_a_gpu_differs_from_the_tutorial_in_its_command_alone() -> None:
    """Both workflows have the same steps up to the command, so the page refers to the tutorial."""
    page = blocks(ROOT / "docs" / "how-to" / "emulating.md")
    (shown,) = [block.text for block in page if block.language == "yaml"]
    *setup, gate = steps(shown)
    assert setup == steps()[: len(setup)]
    assert gate == {"run": "pytest --cka-memory-device=emulate:cuda"}
