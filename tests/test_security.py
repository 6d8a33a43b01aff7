"""Security: reports are plain data, and only files that options name are written."""

import ast
import os
from pathlib import Path

import forked_processes
import pytest
from test_layering import modules_of

FORBIDDEN = {
    "eval", "exec", "__import__",
    "pickle", "marshal", "shelve", "dill", "cloudpickle",
    "torch.load", "torch.save", "torch.hub", "numpy.load", "yaml.load",
    "os.system", "os.popen", "os.execv", "os.spawnv", "subprocess.getoutput",
    "urllib", "requests", "http", "socket", "ftplib", "webbrowser",
}  # fmt: skip
"""Names that evaluate text, unpickle objects, start a shell, or use a network."""
ADMITTED = {
    "pytest_cka_memory": {
        "snapshots.unpickling": ["pickle"],
        "meters.accelerator.refusals": ["pickle"],
        "repair.proof": ["torch.load", "torch.save"],
        "repair.programs": ["exec", "torch.load", "torch.save"],
        "measure.law_processes": ["pickle"],
        "cli.named_functions": ["pickle"],
    },
    "emulated_cuda": {
        "activation": ["torch.load", "torch.save"],
        "loading.loaded": ["pickle"],
    },
}
"""What torch writes is a pickle. It is read in a process of its own, which admits builtin types
only and has limits; ``tests/snapshots/test_hostile_snapshots.py`` has a hundred hostile files for
it. Gradients of two runs are compared by files that the same command has just written to a new
folder, and are read with ``weights_only``. What was live when memory was refused, and what a
program on an emulated card recorded, is written as torch writes snapshots. A script that the user
asks to repair is run. A law of a step that the user names is measured by a process that runs this
step anyway; the two exchange files in a new folder that only the user can read."""
UNPICKLING_EXCHANGES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
    "scatter_object_list", "send_object_list",
}  # fmt: skip
"""Functions of ``torch.distributed`` that send objects by pickle."""
SOURCE = """
import pytest
import torch

@pytest.mark.zero_retention
def test_clean(cka_memory): torch.ones(3)

@pytest.mark.zero_retention
def test_leaks(): test_leaks.kept = torch.ones(3)
"""
SESSION = """
import sys
import tempfile
import pytest

tempfile.tempdir = None  # importing torch has looked it up, before TMPDIR was set
sys.exit(pytest.main(sys.argv[1:]))
"""
OUTPUTS = ("json", "markdown", "html", "baseline")


def named_in(tree: ast.AST) -> set[str]:
    """Return every name that a module uses, as it is written, and its first part."""
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


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pytest_cka_memory", "emulated_cuda", "cka"])
def test_ranks_exchange_no_objects(package: str) -> None:
    """Ranks exchange tensors, and JSON in a store, but no pickled objects."""
    found = {
        f"{name}: {part}"
        for name, file in modules_of(package).items()
        for part in exchanges_in(ast.parse(file.read_text("utf-8")))
    }
    assert found == set()


def exchanges_in(tree: ast.Module) -> set[str]:
    """Return the functions of `UNPICKLING_EXCHANGES` that code names, by whatever path."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {used.rpartition(".")[2] for used in named_in(tree)}
    return (names | attributes) & set(UNPICKLING_EXCHANGES)


@pytest.mark.parametrize(
    "code",
    [
        "torch.distributed.all_gather_object(found, own)",
        "from torch.distributed import all_gather_object",
        "dist.all_gather_object(found, own)",
    ],
)
def test_an_exchange_of_objects_is_found(code: str) -> None:
    """The check finds a call that exchanges objects, also by the full path of its function."""
    assert exchanges_in(ast.parse(code)) == {"all_gather_object"}


@pytest.mark.parametrize("package", ["pytest_cka_memory", "emulated_cuda", "cka"])
def test_no_module_evaluates_text_or_unpickles(package: str) -> None:
    """No package uses eval, pickle or a network, apart from what is admitted."""
    found = {
        name: sorted(FORBIDDEN & named_in(ast.parse(file.read_text("utf-8"))))
        for name, file in modules_of(package).items()
    }
    assert {name: used for name, used in found.items() if used} == ADMITTED.get(package, {})


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pytest_cka_memory", "emulated_cuda", "cka"])
def test_no_module_starts_a_shell(package: str) -> None:
    """No module starts a shell: processes are started with a list of arguments."""
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
def test_forbidden_names_are_found(code: str, name: str) -> None:
    """The checks find each forbidden name, so they are able to fail."""
    assert name in named_in(ast.parse(code))


def run(folder: Path, *options: str) -> set[str]:
    """Run tests with a home and a temporary folder below `folder`; return the files written."""
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
    words = ["-p", "cka_memory", "-p", "no:cacheprovider", *options]
    done = forked_processes.run(
        ["python", "-c", SESSION, *words], folder=tests, environment=environment
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return found - {"tests/test_it.py"}


def test_session_without_file_options_writes_no_file(tmp_path: Path) -> None:
    """Without options for files, a session writes none beside the tests, at home or in /tmp."""
    options = ("--cka-memory-report", "--cka-memory-device=cpu", "--cka-memory-explain")
    assert run(tmp_path, *options) == set()


def test_session_writes_only_the_files_that_options_name(tmp_path: Path) -> None:
    """A session writes only the files that options name; the CPU writes no snapshots."""
    options = [f"--cka-memory-{name}={tmp_path / 'out' / name}" for name in OUTPUTS]
    options += ["--cka-memory-update-baseline", f"--cka-memory-snapshots={tmp_path / 'snapshots'}"]
    assert run(tmp_path, "--cka-memory-device=cpu", *options) == {f"out/{name}" for name in OUTPUTS}
