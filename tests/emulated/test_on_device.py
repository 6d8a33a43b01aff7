"""Runs the tests of other files in three processes that have an emulated device."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
WITHOUT_VALUES = ("on_device.py",)
WITH_VALUES = (
    "on_device_forms.py",
    "on_device_equivalents.py",
    "on_device_operators.py",
    "on_device_reads.py",
    "on_device_contexts.py",
    "on_device_training.py",
    "on_device_outputs.py",
    "on_device_rounding.py",
)
BEFORE_TORCH = ("on_device_kernels.py",)
"""Kernels of torch, such as that of ``torch.cuda._sleep``, are known if it is imported later."""
NAMES = [
    (file, node.name, (node.decorator_list or [node])[0].lineno)
    for file in (*WITHOUT_VALUES, *WITH_VALUES, *BEFORE_TORCH)
    for node in ast.parse((FOLDER / file).read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def outputs(python) -> dict[str, str]:
    """Return, for each file, the output of the session that runs all its tests."""
    options = ("-pno:cacheprovider", "-pno:randomly", "-rA", "--tb=short")
    found = {}
    for files in (WITHOUT_VALUES, WITH_VALUES, BEFORE_TORCH):
        paths = [str(FOLDER / file) for file in files]
        plugins = () if files is WITHOUT_VALUES else ("-p", "values_on_both")
        run = python(
            *("-m", "pytest", *plugins, *paths, *options),
            forked=files is not BEFORE_TORCH,
            PYTHONPATH=str(FOLDER),
        )
        found.update(dict.fromkeys(files, run.stdout + run.stderr))
    return found


@pytest.mark.parametrize(
    ("file", "name", "line"), NAMES, ids=[f"{file}-{name}" for file, name, _ in NAMES]
)
def test_test_on_the_emulated_device_passes(outputs, file, name, line):
    """All cases of a test function on the device pass; its own docstring says what it checks."""
    output = outputs[file]
    outcomes = re.findall(rf"^(\w+) \S*{file}::{name}(?:\[|\s|$)", output, re.MULTILINE)
    skipped = re.search(rf"^SKIPPED \[1\] \S*{file}:{line}: (.*)", output, re.MULTILINE)
    if skipped is not None:
        pytest.skip(skipped[1])
    assert outcomes, output
    assert set(outcomes) == {"PASSED"}, output
