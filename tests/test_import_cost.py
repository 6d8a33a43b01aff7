"""Heavy imports wait until something is measured: torch takes a second and 240 MB."""

import subprocess
import sys
from pathlib import Path

import pytest


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "pytest_cka_memory",
        "pytest_cka_memory.plugin.entry_point",
        "pytest_cka_memory.meters",
        "pytest_cka_memory.testing",
    ],
)
def test_the_plugin_imports_no_torch(module: str) -> None:
    """Each project that has the plugin installed loads it, so it imports neither torch nor cka."""
    assert not loaded_by(f"import {module}") & {"torch", "numpy", "cka"}


@pytest.mark.slow
def test_an_unused_plugin_imports_only_what_declares_it(tmp_path: Path) -> None:
    """A session that measures nothing imports only what declares
    options, markers, hooks, fixture.
    """
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n", "utf-8")
    (tmp_path / "conftest.py").write_text(
        "import sys\ndef pytest_unconfigure(): print('loaded', *sys.modules)\n", "utf-8"
    )
    loaded = {}
    for block in ("no:cacheprovider", "no:cka_memory"):
        command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", block]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        loaded[block] = set(done.stdout.rpartition("loaded ")[2].split())
    package = "pytest_cka_memory"
    mine = {name for name in loaded["no:cacheprovider"] if name.startswith(package)}
    modules = (
        *(
            "_version",
            "core",
            "core.markers",
            "errors",
            "hookspecs",
            "integrations",
        ),
        "meters",
        *(
            "plugin",
            "plugin.entry_point",
            "plugin.activation",
            "plugin.pytest_private",
        ),
    )
    assert mine == {package, *(f"{package}.{name}" for name in modules)}
    costly = {"torch", "numpy", "tabulate", "tqdm", "cka", "fractions", "reprlib", "html.parser"}
    assert not (loaded["no:cacheprovider"] - loaded["no:cka_memory"]) & costly


def test_what_a_session_registers_opens_no_region_and_judges_none() -> None:
    """What opens regions, explains and judges them follows with the first measured test."""
    names = ("hooks", "reporter", "settings", "shared_regions")
    loaded = loaded_by("\n".join(f"import pytest_cka_memory.plugin.{name}" for name in names))
    late = ("core.figures", "core.verdicts", "holders", "limits", "measure.region", "reports")
    assert not loaded & {f"pytest_cka_memory.{name}" for name in late}


def test_reading_and_judging_figures_needs_no_torch() -> None:
    """An xdist controller and the comparison of two reports handle numbers, without torch."""
    statement = (
        "from pytest_cka_memory import MemoryProbe\n"
        "from pytest_cka_memory.limits import limit_from_marker\n"
        "from pytest_cka_memory.core.verdicts import judge\n"
        "from pytest_cka_memory.testing import ScriptedMeter\n"
        "with MemoryProbe(meter=ScriptedMeter()).measure() as region: pass\n"
        "judge('n', region.record, [limit_from_marker('zero_retention', (), {})]).to_dict()"
    )
    assert "torch" not in loaded_by(statement)


def test_emulated_device_imports_neither_the_plugin_nor_torch() -> None:
    """Each process of an emulating program imports ``loading``, so that must import little."""
    unwanted = {"pytest_cka_memory", "pytest", "torch", "numpy", "ctypes"}
    for module in ("emulated_cuda", "emulated_cuda.loading"):
        assert not loaded_by(f"import {module}") & unwanted


@pytest.mark.slow
def test_cka_imports_neither_the_plugin_nor_plotting() -> None:
    """The library stands on its own: importing it imports neither
    the plugin nor plotting packages.
    """
    assert not loaded_by("import cka") & {"pytest_cka_memory", "pytest", "matplotlib", "pandas"}


@pytest.mark.parametrize("option", ["card", "to"])
def test_repair_refuses_a_wrong_card_before_it_imports_torch(option: str) -> None:
    """The answer to a misspelt name comes at once."""
    statement = (
        "from contextlib import suppress\n"
        "from pytest_cka_memory.cli.main import main\n"
        f"with suppress(SystemExit): assert main(['repair', '--{option}', 'rtx4900', '.']) == 2"
    )
    assert "torch" not in loaded_by(statement)
