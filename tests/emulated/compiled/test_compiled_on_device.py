"""Runs the tests of compiled code in a process that has an emulated device."""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(file.name for file in FOLDER.glob("on_device_*.py"))
NAMES = [
    (file, node.name)
    for file in FILES
    for node in ast.parse((FOLDER / file).read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def output(python, tmp_path_factory) -> str:
    """Return the output of the session that runs all tests of the files."""
    pytest.importorskip("triton")
    caches = tmp_path_factory.mktemp("caches")
    paths = [str(FOLDER / file) for file in FILES]
    plugins = ("-p", "values_on_both", "-pno:cacheprovider", "-pno:randomly")
    run = python(
        *("-m", "pytest", *plugins, *paths, "-rA", "--tb=short"),
        forked=True,
        PYTHONPATH=f"{FOLDER.parent}:{FOLDER}",
        TRITON_CACHE_DIR=str(caches / "triton"),
        TORCHINDUCTOR_CACHE_DIR=str(caches / "inductor"),
    )
    return run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("file", "name"), NAMES)
def test_test_of_compiled_code_passes(output, file, name):
    """All cases of a test function pass; its own docstring says what it checks."""
    outcomes = re.findall(rf"^(\w+) \S*{file}::{name}(?:\[|\s|$)", output, re.MULTILINE)
    assert outcomes, output
    assert set(outcomes) == {"PASSED"}, output
