"""Imports what sessions import of the plugin, once for all processes that a server forks.

This is done inside a session: pytest warns of packages with plugins that were imported elsewhere.
"""

import contextlib
import importlib
import io
import pkgutil
import sys
import tempfile

import listed_plugins
import pytest

_PACKAGES = ("core", "holders", "limits", "measure", "meters", "plugin", "reports", "stored")
_IMPORTED_LATE = "tabulate", "emulated_cuda.values.registration", "emulated_cuda.triton.launches"
"""What sessions import late: each with a table, each with an emulated device."""


class _Importing:
    def pytest_configure(self, config: pytest.Config) -> None:
        """Import all modules of the packages, and let sessions search less of each plugin."""
        listed_plugins.list_hooks_and_fixtures(config.pluginmanager)
        # Not plainly, because pytest warns of a package whose asserts it could not rewrite.
        importlib.import_module("emulated_cuda")
        for name in _IMPORTED_LATE:
            importlib.import_module(name)
        from pytest_cka_memory.plugin.pytest_private import plain_imports

        with plain_imports():
            for package in _PACKAGES:
                name = f"pytest_cka_memory.{package}"
                imported = importlib.import_module(name)
                for module in pkgutil.walk_packages(imported.__path__, f"{name}."):
                    if not module.name.endswith("._counter"):  # no module of Python's
                        importlib.import_module(module.name)


def _import_in_session() -> None:
    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        for name in ("ADDOPTS", "PLUGINS", "DISABLE_PLUGIN_AUTOLOAD"):  # set by the first test
            patch.delenv(f"PYTEST_{name}", raising=False)
        # pytest-benchmark leaves something by which later sessions do not warn of unknown marks.
        options = "-p", "no:cacheprovider", "-p", "no:benchmark", "--collect-only", folder
        status = pytest.main([*options, f"--rootdir={folder}"], plugins=[_Importing()])
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED, printed.getvalue()


def forget(*packages: str) -> None:
    """Remove packages from the imported modules, so that this process imports them again."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages:
            del sys.modules[name]


_import_in_session()
forget("xdist")  # its workers have the path that it found when it was imported
