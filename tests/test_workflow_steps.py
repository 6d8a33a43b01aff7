"""Every ``run:`` step of the workflows, run in a fresh clone with the variables that GitHub sets.

What takes long (``.ci/run``, pip, pytest) is replaced by a program that writes down how it was
called; ``test_actions.py`` runs the steps of the composite action with the real programs.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pytest_cka_memory import __version__
from pytest_cka_memory.plugin import add_options

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LONG = ("run", "against", "canary", "artefacts", "coverage")
TAG = f"v{__version__}"
RECORDER = '#!/bin/sh\necho "$(basename "$0") $*" >> "$CALLS"\n'
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="the scripts need bash"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a checkout can be cloned"),
]


def _steps():
    """Yield each step with a script, with the values of each line of its job's matrix."""
    for file in WORKFLOWS:
        for name, job in yaml.safe_load(file.read_text("utf-8"))["jobs"].items():
            matrix = job.get("strategy", {}).get("matrix", {})
            lines = matrix.get("include") or [
                {key: value} for key, values in matrix.items() for value in values
            ]
            for number, step in enumerate(job["steps"]):
                for index, line in enumerate(lines or [{}]):
                    if "run" in step:
                        where = f"{file.stem}-{name}-{number}-{index}"
                        yield pytest.param(job, step, line, id=where)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Clone the checkout, with its uncommitted files, and replace what takes long."""
    folder = tmp_path_factory.mktemp("clone") / "repository"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name in LONG:
        (folder / ".ci" / name).write_text(RECORDER, "utf-8")
    return folder


def _filled(text, values):
    return re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda found: str(values.get(found[1], "")), str(text))


@pytest.mark.slow
@pytest.mark.parametrize(("job", "step", "line"), [*_steps()])
def test_step_runs_in_a_fresh_clone(clone, tmp_path, job, step, line):
    """The script ends with status 0, and calls pytest with options that the plugin has."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("python", "pip", "pytest"):
        (programs / name).write_text(RECORDER, "utf-8")
        (programs / name).chmod(0o755)
    folder = clone / step.get("working-directory", ".")
    folder.mkdir(exist_ok=True)
    if re.search("^(find|python).* dist", step["run"]):  # without a checkout
        folder = tmp_path
        _artefacts(folder / "dist", clone)
    values = {f"matrix.{name}": value for name, value in line.items()}
    values |= {"runner.temp": str(tmp_path)}
    given = {**job.get("env", {}), **step.get("env", {})}
    calls = tmp_path / "calls"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "CALLS": str(calls),
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_REF": f"refs/tags/{TAG}",
            "GITHUB_REF_NAME": TAG,
            "GITHUB_WORKSPACE": str(clone),
            "RUNNER_TEMP": str(tmp_path),
            **{name: _filled(value, values) for name, value in given.items()},
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if step.get("name") == "Check the version":
        # It refuses this checkout unless a release was prepared in it.
        assert f"{TAG}: " in done.stderr or done.stdout == f"{TAG} can be released\n"
        return
    assert done.returncode == 0, done.stderr
    if step["run"].startswith("find dist"):
        assert [path.suffix for path in (folder / "dist").iterdir()] == [".whl"]
        return
    called = calls.read_text("utf-8")
    parser = pytest.Parser(_ispytest=True)
    add_options(parser)
    groups = (option for group in parser._groups for option in group.options)
    known = {name for option in groups for name in option.names()}
    assert set(re.findall(r"--cka-memory[a-z-]*", called)) <= known


def _artefacts(folder, clone):
    folder.mkdir()
    (folder / "pytest_cka_memory-0.1.0-py3-none-manylinux_2_28_x86_64.whl").touch()
    with tarfile.open(folder / "pytest_cka_memory-0.1.0.tar.gz", "w:gz") as archive:
        for name in ("pytest_cka_memory", "emulated_cuda", "cka", "tests/docs"):
            archive.add(clone / name, f"pytest_cka_memory-0.1.0/{name}")


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / ".ci").iterdir()))
def test_scripts_are_valid_bash(name):
    """Each script of .ci can be parsed and stops at the first error."""
    text = (ROOT / ".ci" / name).read_text("utf-8")
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / name)], check=True)
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


@pytest.mark.parametrize(
    "file",
    [".ci/run", ".ci/coverage", ".ci/artefacts", "noxfile.py", ".github/workflows/platforms.yml"],
)
def test_slow_tests_run_wherever_all_tests_do(file: str) -> None:
    """Every command that runs all tests asks for the slow ones, too."""
    lines = (ROOT / file).read_text("utf-8").splitlines()
    of_all = [
        line
        for line in lines
        if re.search(r"worksteal|-m pytest", line) and not re.search(r"tests/|\bspread\[", line)
    ]
    assert of_all
    assert [line for line in of_all if "slow" not in line] == []
