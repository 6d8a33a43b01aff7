"""Commands noted as ``not run`` are checked: requirements, scripts and options exist."""

import importlib.util
import io
import re
import runpy
import shlex
import sys
from contextlib import redirect_stdout

import pytest
from docs_pages import ROOT, blocks, commands, pages
from packaging.requirements import Requirement

from emulated_cuda import running

NOT_RUN = [
    command
    for page in pages()
    for block in blocks(page)
    if block.language == "sh" and block.note.startswith("not run: ")
    for command in commands(block)
]
PIP = [command for command in NOT_RUN if "pip install" in command]
BENCHMARKS = [command for command in NOT_RUN if command.startswith("python benchmarks/")]
SCRIPTS = [command for command in NOT_RUN if command.startswith("bash ")]
_PYTEST = re.compile(r"(\S+=\S+ )?(torchrun .*)?(\S+ -m )?pytest")
EMULATED = [command for command in NOT_RUN if command.startswith("python -m emulated_cuda ")]
PYTEST = [command for command in NOT_RUN if _PYTEST.match(command)]
OTHERS = {
    "python3 -m venv .venv",
    ". .venv/bin/activate",
    "git init --initial-branch=main",
    "git add .",
    "PYTORCH_ALLOC_CONF=expandable_segments:True python -m emulated_cuda --memory 1.62GB "
    "--no-values train.py",
    'git commit -m "Add a memory gate"',
    "git remote add origin https://github.com/OWNER/churn",
    "git push --set-upstream origin main",
    "python -m pytest_cka_memory repair --card rtx4090 --prove train.py --batch-size 24 --steps 3",
    "python tests/docs/redraw.py",
    "nox -s lint types tests",
    "python tests/emulated/aliases_of_operators.py",
    'CFLAGS="-fsanitize=address -fno-omit-frame-pointer -g" python setup.py build_ext --inplace '
    "--force",
    "ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONPATH=.      "
    'LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" '
    "python tests/emulated/hostile_programs.py",
}
"""Commands in which nothing can be checked that is not obvious."""
NOT_INSTALLED = {"nbconvert"}
"""Modules of other projects that a page runs and that the extra `test` does not install."""


def test_programs_are_run_on_devices_by_arguments_that_exist() -> None:
    """Everything before the program is an option of ``python -m emulated_cuda``."""
    assert EMULATED
    for command in EMULATED:
        _, _, _, *arguments = shlex.split(command)
        options = running.parser().parse_args(arguments)
        program = options.program[0]
        if options.module:
            assert program in NOT_INSTALLED or importlib.util.find_spec(program)
        else:
            assert program == "train.py"


def test_every_command_that_is_not_run_is_checked() -> None:
    """Every command that the docs show and do not run belongs to a kind that a test here checks."""
    assert {*EMULATED, *PIP, *BENCHMARKS, *SCRIPTS, *PYTEST, *OTHERS} == set(NOT_RUN)


def test_readme_shows_the_two_commands_for_a_checkout() -> None:
    """``.ci/run`` reads both commands from the README; each of them does all of its own set-up."""
    readme = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert [line.strip() for line in readme if line.strip().startswith("pip ")] == [
        'pip install -e ".[test]" && pytest tests/gates --cka-memory-report',
        'pip install -e ".[test]" && pytest -n auto --dist worksteal',
    ]


@pytest.mark.parametrize("command", PIP)
def test_pip_commands_install_this_project_and_its_extras(command: str) -> None:
    """The name and the extras in a pip command exist in pyproject.toml; nothing is installed."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    *_, written = shlex.split(command.partition(" && ")[0])
    if command.endswith(" torch numpy"):
        return
    if written.endswith(".whl"):
        distribution, _, _ = written.rpartition("/")[2].partition("-")
        assert f'name = "{distribution.replace("_", "-")}"' in project
        return
    requirement = Requirement(written.replace(".[", "pytest-cka-memory[").strip())
    assert f'name = "{requirement.name}"' in project
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in requirement.extras)
    assert requirement.url in (None, "git+https://github.com/OWNER/pytest-cka-memory")


@pytest.mark.parametrize("command", BENCHMARKS)
def test_benchmarks_have_the_options_shown(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running a benchmark takes minutes, so only its ``--help`` is run and searched for the
    options.
    """
    _, script, *words = shlex.split(command)
    options = [word for word in words if word.startswith("--")]
    if "argparse" not in (ROOT / script).read_text("utf-8"):  # it does its work at once
        assert options == []
        return
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    usage = io.StringIO()
    with redirect_stdout(usage), pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert [option for option in options if f"{option} " not in usage.getvalue()] == []


@pytest.mark.parametrize("command", SCRIPTS)
def test_shell_scripts_exist(command: str) -> None:
    """Every shell script that a page names exists and begins with the line for bash."""
    script = ROOT / shlex.split(command)[1]
    assert script.read_text("utf-8").startswith("#!/usr/bin/env bash\n")


@pytest.mark.parametrize("command", PYTEST)
def test_pytest_commands_name_tests_that_exist(command: str) -> None:
    """The paths in pytest commands exist; their options are checked in ``test_links.py``."""
    paths = [word for word in shlex.split(command) if "tests/" in word]
    assert [path for path in paths if not (ROOT / path.rpartition("=")[2]).exists()] == []
