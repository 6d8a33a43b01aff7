"""What the README says of trust: reports are data, and only what options name is written."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_layering import modules_of

FORBIDDEN = {
    "eval", "exec", "__import__",
    "pickle", "marshal", "shelve", "dill", "cloudpickle",
    "torch.load", "torch.save", "torch.hub", "numpy.load", "yaml.load",
    "os.system", "os.popen", "os.execv", "os.spawnv", "subprocess.getoutput",
    "urllib", "requests", "http", "socket", "ftplib", "webbrowser",
}  # fmt: skip
"""What runs text as code, reads objects from files, starts a shell, or goes to a network."""
SOURCE = """
import pytest
import torch

@pytest.mark.zero_retention
def test_clean(cka_memory): torch.ones(3)

@pytest.mark.zero_retention
def test_leaks(): test_leaks.kept = torch.ones(3)
"""
OUTPUTS = ("json", "markdown", "html", "baseline")


def named_in(tree: ast.AST) -> set[str]:
    """Every name that a module uses, dotted as it is written, and all it begins with."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names | {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", ["pytest_cka_memory", "cka"])
def test_no_module_runs_text_or_reads_objects(package: str) -> None:
    """No eval, no pickle, no network: neither of the packages has a use for them."""
    found = {
        name: sorted(FORBIDDEN & named_in(ast.parse(file.read_text("utf-8"))))
        for name, file in modules_of(package).items()
    }
    assert {name: used for name, used in found.items() if used} == {}


@pytest.mark.parametrize("package", ["pytest_cka_memory", "cka"])
def test_no_module_starts_a_shell(package: str) -> None:
    """Processes are started from a list of arguments."""
    shells = [
        f"{name}:{keyword.value.lineno}"
        for name, file in modules_of(package).items()
        for keyword in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(keyword, ast.keyword) and keyword.arg == "shell"
    ]
    assert shells == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import pickle", "pickle"),
        ("from pickle import load", "pickle"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load", "torch.load"),
        ("def f(x): return eval(x)", "eval"),
        ("import os.path, os\nos.system('x')", "os.system"),
        ("import urllib.request", "urllib"),
    ],
)
def test_what_is_forbidden_would_be_found(code: str, name: str) -> None:
    """Else the tests above could not fail."""
    assert name in named_in(ast.parse(code))


def run(folder: Path, *options: str) -> set[str]:
    """Run the tests in a folder of their own, home and temporary files included; what is new."""
    tests, home, temporary = folder / "tests", folder / "home", folder / "tmp"
    for made in (tests, home, temporary):
        made.mkdir()
    (tests / "test_it.py").write_text(SOURCE, "utf-8")
    environment = {
        **os.environ, "HOME": str(home), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "",
    }  # fmt: skip
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "CI"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "cka_memory", "-p", "no:cacheprovider", *options],
        cwd=tests, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return found - {"tests/test_it.py"}


def test_a_session_writes_no_file_that_no_option_names(tmp_path: Path) -> None:
    """Measuring, judging, explaining: neither beside the tests, nor at home, nor among the
    temporary files.
    """
    options = ("--cka-memory-report", "--cka-memory-device=cpu", "--cka-memory-explain")
    assert run(tmp_path, *options) == set()


def test_a_session_writes_what_options_name_and_nothing_else(tmp_path: Path) -> None:
    """Each file where it was asked for; the CPU has no snapshots to put into their folder."""
    options = [f"--cka-memory-{name}={tmp_path / 'out' / name}" for name in OUTPUTS]
    options += ["--cka-memory-update-baseline", f"--cka-memory-snapshots={tmp_path / 'snapshots'}"]
    assert run(tmp_path, "--cka-memory-device=cpu", *options) == {f"out/{name}" for name in OUTPUTS}
