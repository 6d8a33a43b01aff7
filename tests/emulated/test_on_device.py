"""Runs the tests of ``on_device.py`` in one process that has an emulated device."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "on_device.py"
NAMES = [
    node.name
    for node in ast.parse(SOURCE.read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def output(python) -> str:
    """Return the output of one session that runs all tests of ``on_device.py``."""
    options = ("-pno:cacheprovider", "-pno:randomly", "-rA", "--tb=short")
    run = python("-m", "pytest", str(SOURCE), *options)
    return run.stdout + run.stderr


@pytest.mark.parametrize("name", NAMES)
def test_test_on_the_emulated_device_passes(output, name):
    """All cases of the test pass; its docstring says what it checks."""
    outcomes = re.findall(rf"^(\w+) \S*on_device\.py::{name}(?:\[|\s|$)", output, re.MULTILINE)
    assert outcomes, output
    assert set(outcomes) == {"PASSED"}, output
