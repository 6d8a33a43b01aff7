"""Frames of torch and pytest are left out wherever they are installed."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_cka_memory.core import places

SOURCE = """
import torch

KEPT = []
# Python 3.10 does not know the class of a running function.
QUALIFIED = "Keeping.forward" if hasattr(compile("", "", "exec"), "co_qualname") else "forward"

class Keeping(torch.nn.Linear):
    def forward(self, values):
        KEPT.append(super().forward(values))
        return KEPT[-1]

def test_leaks(cka_memory):
    model = torch.nn.Sequential(Keeping(8, 8))
    with cka_memory.measure() as region, torch.no_grad():
        model(torch.ones(4, 8))
    (held,) = region.retained
    assert [frame.rpartition(" ")[2] for frame in held.created_at] == [
        QUALIFIED, "test_leaks"
    ], held.created_at
"""


BOTH_METERS = """
import os
import sys
import pytest
import torch
for native in ("1", "0"):
    child = os.fork()
    if child == 0:
        os.environ["CKA_MEMORY_NATIVE"] = native
        os._exit(pytest.main(sys.argv[1:]))
    os.waitpid(child, 0)
"""
"""Runs the same session twice in forks of one process, because importing torch takes long."""


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """A folder from which torch and pytest can be imported, as from a user's site folder."""
    folder = tmp_path / "user" / "lib"
    folder.mkdir(parents=True)
    for name in ("torch", "pytest", "_pytest", "pluggy"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (folder / name).symlink_to(Path(spec.origin).parent)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_failure_shows_only_the_users_frames(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, moved: Path
) -> None:
    """Frames of libraries on another entry of the path are left out, with either meter."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text(SOURCE)
    path = f"{moved}:{Path(places.__file__).parents[2]}"
    done = run_python(
        "-c", BOTH_METERS, "-q", "-p", "cka_memory", "-p", "no:cacheprovider",
        "--cka-memory-device=cpu", cwd=tests, PYTHONPATH=path, PYTEST_ADDOPTS="",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )  # fmt: skip
    assert done.stdout.count("1 passed") == 2, done.stdout + done.stderr


def test_library_that_was_not_imported_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was not imported has no frames, so torch is not imported to find out."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "pluggy")
    assert not any("torch" in prefix for prefix in places.foreign_prefixes())
    assert not any("pluggy" in folder for folder in places.runner_folders())
    assert "torch" not in sys.modules


def test_packages_beside_torch_belong_to_its_distribution() -> None:
    """Packages of torch's distribution, such as functorch, belong to it."""
    folder = Path(torch.__file__).parents[1]
    assert places.is_foreign(str(folder / "functorch" / "dim" / "op.py"))
    assert not places.is_foreign(str(folder / "functorch_extra" / "op.py"))
    assert not places.is_foreign(str(folder / "torchvision" / "ops.py"))


@pytest.mark.slow
def test_generated_file_names_do_not_fill_memory() -> None:
    """Code compiled at run time has new file names each time, which must not fill memory."""
    for number in range(20_000):
        assert not places.is_foreign(f"<generated {number}>")
    assert places.is_foreign(torch.nn.Linear.forward.__code__.co_filename)
    assert len(places.is_foreign_file) < 5_000
