"""Runs the tests of other files, each in one process that has an emulated device."""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = ("on_device.py", "on_device_values.py")
NAMES = [
    (file, node.name)
    for file in FILES
    for node in ast.parse((FOLDER / file).read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def outputs(python) -> dict[str, str]:
    """Return the output of one session for each file, which runs all its tests."""
    options = ("-pno:cacheprovider", "-pno:randomly", "-rA", "--tb=short")
    runs = {file: python("-m", "pytest", str(FOLDER / file), *options) for file in FILES}
    return {file: run.stdout + run.stderr for file, run in runs.items()}


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_test_on_the_emulated_device_passes(outputs, file, name):
    """All cases of the test pass; its docstring says what it checks."""
    output = outputs[file]
    outcomes = re.findall(rf"^(\w+) \S*{file}::{name}(?:\[|\s|$)", output, re.MULTILINE)
    assert outcomes, output
    assert set(outcomes) == {"PASSED"}, output
