"""The README is run: every block of Python, and the text it says a failure prints."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
TESTS = [text for text in PYTHON if "def test_" in text]
SCRIPTS = [text for text in PYTHON if "def test_" not in text]

FIXTURES = """
import pytest, torch

@pytest.fixture
def model(cka_memory):
    layers = torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    return torch.nn.Sequential(*layers).to(cka_memory.device)

@pytest.fixture
def loader():
    return torch.utils.data.DataLoader(torch.randn(48, 8), batch_size=8)
"""


def test_the_readme_shows_its_two_commands():
    """Each does all of its own set-up, and nothing else is called the quick start."""
    commands = [line.strip() for line in README.splitlines() if line.strip().startswith("pip ")]
    assert commands[:2] == [
        'pip install -e ".[test]" && pytest tests/gates --cka-memory-report',
        'pip install -e ".[test]" && pytest',
    ]


@pytest.mark.parametrize("block", TESTS, ids=lambda text: re.findall(r"def (test_\w+)", text)[0])
def test_the_readme_tests_do_what_it_says(pytester, block):
    """They pass, but for the one shown failing, whose text is the text shown."""
    pytester.makeconftest(FIXTURES)
    pytester.makepyfile(test_training=block)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--cka-memory-device=cpu")
    if "test_training_loop" not in block:
        result.assert_outcomes(passed=1)
        return
    result.assert_outcomes(failed=1)
    (shown,) = [text for language, text in BLOCKS if text.startswith("flat_per_batch broken:")]
    # Here the file lies in a folder of pytest's own making, named before it.
    printed = re.sub(r"[\w.-]+/(test_training\.py)", r"\1", result.stdout.str())
    for line in shown.splitlines():
        assert line in printed


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda text: text.split("\n")[0])
def test_the_readme_scripts_run(pytester, block):
    """Their assertions hold."""
    script = pytester.makepyfile(block)
    assert pytester.runpython(script).ret == 0
