"""Frames of torch and pytest are left out wherever they are installed."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_cka_memory.core import libraries

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


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "ledger"])
def test_failure_shows_only_the_users_frames(
    run_python: Callable[..., Any], tmp_path: Path, moved: Path, native: str
) -> None:
    """Frames of libraries on another entry of the path are left out, with either meter."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text(SOURCE)
    path = f"{moved}:{Path(libraries.__file__).parents[2]}"
    done = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--cka-memory-device=cpu",
        cwd=tests, PYTHONPATH=path, CKA_MEMORY_NATIVE=native, PYTEST_ADDOPTS="",
    )  # fmt: skip
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_library_that_was_not_imported_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was not imported has no frames, so torch is not imported to find out."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "pluggy")
    assert not any("torch" in prefix for prefix in libraries.foreign_prefixes())
    assert not any("pluggy" in folder for folder in libraries.runner_folders())
    assert "torch" not in sys.modules


def test_packages_beside_torch_belong_to_its_distribution() -> None:
    """Packages of torch's distribution, such as functorch, belong to it."""
    folder = Path(torch.__file__).parents[1]
    assert libraries.is_foreign(str(folder / "functorch" / "dim" / "op.py"))
    assert not libraries.is_foreign(str(folder / "functorch_extra" / "op.py"))
    assert not libraries.is_foreign(str(folder / "torchvision" / "ops.py"))


def test_generated_file_names_do_not_fill_memory() -> None:
    """Code compiled at run time has new file names each time, which must not fill memory."""
    for number in range(20_000):
        assert not libraries.is_foreign(f"<generated {number}>")
    assert libraries.is_foreign(torch.nn.Linear.forward.__code__.co_filename)
    assert len(libraries.is_foreign_file) < 5_000
