"""Heavy imports wait until something is measured: torch takes a second and 240 MB."""

import subprocess
import sys

import pytest


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after `statement`."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "pytest_cka_memory",
        "pytest_cka_memory.plugin",
        "pytest_cka_memory.meters",
        "pytest_cka_memory.testing",
    ],
)
def test_the_plugin_imports_no_torch(module: str) -> None:
    """It is loaded in every project that has it installed; no cka either."""
    assert not loaded_by(f"import {module}") & {"torch", "numpy", "cka"}


def test_reading_and_judging_figures_needs_no_torch() -> None:
    """A controller of workers, and whoever compares two reports, only handles numbers."""
    statement = (
        "from pytest_cka_memory import MemoryProbe\n"
        "from pytest_cka_memory.limits import limit_from_marker\n"
        "from pytest_cka_memory.results import judge\n"
        "from pytest_cka_memory.testing import ScriptedMeter\n"
        "with MemoryProbe(meter=ScriptedMeter()).measure() as region: pass\n"
        "judge('n', region.record, [limit_from_marker('zero_retention', (), {})]).to_dict()"
    )
    assert "torch" not in loaded_by(statement)


def test_cka_imports_neither_the_plugin_nor_plotting() -> None:
    """The library stands on its own."""
    assert not loaded_by("import cka") & {"pytest_cka_memory", "pytest", "matplotlib", "pandas"}
