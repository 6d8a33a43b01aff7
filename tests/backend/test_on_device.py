"""The accelerator meter, the bundled CKA and the tests for GPUs pass on ``hostdevice``."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE / "on_device.py"
NAMES = [
    node.name
    for node in ast.parse(SOURCE.read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def told(on_device):
    """What the session over ``on_device.py`` printed, run once for all of its tests."""
    return on_device(SOURCE, "--cka-memory-device=privateuseone", "-rA", "--tb=short").text


@pytest.mark.parametrize("name", NAMES)
def test_what_is_claimed_of_it_holds_on_the_device(told, name):
    """``on_device.py`` says what that is; every case of it passes."""
    outcomes = re.findall(rf"^(\w+) \S*on_device\.py::{name}(?:\[|\s|$)", told, re.MULTILINE)
    assert outcomes, told
    assert set(outcomes) == {"PASSED"}, told


def test_the_tests_for_gpus_pass_on_it(on_device):
    """None is skipped: torch finds an accelerator, and takes it by itself."""
    run = on_device(HERE.parent / "gpu")
    assert run.code == pytest.ExitCode.OK, run.text
    assert " passed" in run.text
    assert "skipped" not in run.text
