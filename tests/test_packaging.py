"""What a wheel and the metadata promise is what the project has."""

import os
import re
import runpy
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import setuptools
from setuptools.config.pyprojecttoml import load_file

import emulated_cuda
import pytest_cka_memory

ROOT = Path(__file__).parents[1]
SOURCES = [*ROOT.glob("cka/**/*.[ch]"), *ROOT.glob("pytest_cka_memory/**/*.[ch]")]
SOURCES += [*ROOT.glob("emulated_cuda/**/*.?pp")]


@pytest.fixture
def commands(monkeypatch):
    """Return the commands that setup.py gives to setuptools."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    return given["cmdclass"]


@pytest.mark.sources
def test_compiled_code_does_not_use_the_interface_of_python():
    """A library that included Python.h would serve one version of Python only."""
    assert len(SOURCES) > 20
    assert [file for file in SOURCES if "Python.h" in file.read_text("utf-8")] == []


@pytest.mark.sources
@pytest.mark.parametrize("package", ["cka", "emulated_cuda", "pytest_cka_memory"])
def test_every_file_that_a_package_reads_is_installed(package):
    """What is neither Python nor compiled is in the package data, so that a wheel has it."""
    given = load_file(str(ROOT / "pyproject.toml"))["tool"]["setuptools"]["package-data"]
    installed = {file for pattern in given[package] for file in (ROOT / package).glob(pattern)}
    built = {".py", ".pyc", ".so", ".c", ".h", ".cpp", ".hpp", ".map"}
    read = {
        file
        for file in (ROOT / package).rglob("*")
        if file.is_file() and file.suffix not in built and "__pycache__" not in file.parts
    }
    assert ROOT / package / "py.typed" in read
    assert read <= installed


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permission")
def test_program_of_the_driver_can_be_run():
    """A wheel keeps the permissions of its files: PATH of emulated processes has ``nvidia-smi``."""
    assert os.access(Path(emulated_cuda.__file__).parent / "site/programs/nvidia-smi", os.X_OK)


@pytest.mark.sources
def test_names_of_libraries_are_found_by_every_python(commands):
    """Each library ends with .so alone, which every Python on Linux accepts."""
    build = commands["build_ext"](setuptools.Distribution())
    assert Path(build.get_ext_filename("cka.functional._gram")) == Path("cka/functional/_gram.so")
    assert ".so" in EXTENSION_SUFFIXES or sys.platform == "win32"


@pytest.mark.sources
@pytest.mark.parametrize(
    ("compiled", "is_pure"), [(True, False), (False, True)], ids=["compiled", "not compiled"]
)
def test_wheel_is_named_after_what_was_compiled(commands, tmp_path, compiled, is_pure):
    """A wheel without a library can be installed anywhere, and says so."""
    extension = setuptools.Extension("x._gram", ["x/_gram.c"])  # declared, compiled or not
    project = setuptools.Distribution({"name": "x", "version": "1", "ext_modules": [extension]})
    wheel = commands["bdist_wheel"](project)
    wheel.finalize_options()
    wheel.bdist_dir = str(tmp_path)
    if compiled:
        (tmp_path / "_gram.so").touch()
    python, abi, platform = wheel.get_tag()
    assert (python, abi, platform == "any") == ("py3", "none", is_pure)


def test_citation_has_the_version_of_the_package():
    """The version is written in _version.py; the citation repeats it."""
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    (version,) = re.findall(r"^version: (.+)$", citation, re.MULTILINE)
    assert version == pytest_cka_memory.__version__
