"""What the pages say about their examples, beyond what the examples show."""

from pathlib import Path

import pytest
from docs_pages import block_noted
from forked_processes import run
from test_links import options


@pytest.mark.usefixtures("session")
def test_readme_example_passes_when_its_advice_is_followed() -> None:
    """The page says so below the failure."""
    example = block_noted("file: tests/test_evaluation.py").text
    assert example.count(".mean()") == 1
    fixed = example.replace(".mean()", ".mean().item()")
    Path("test_evaluation.py").write_text(fixed, "utf-8")
    done = run(["pytest"], merged=True)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout


@pytest.mark.emulates
@pytest.mark.usefixtures("session")
def test_example_of_the_fixture_passes_on_the_emulated_device() -> None:
    """The same test, unchanged, on a CUDA device."""
    example = block_noted("file: test_fixture_by_example.py").text
    Path("test_fixture_by_example.py").write_text(example, "utf-8")
    options = "--cka-memory-device=emulate:cuda", "--cka-memory-report"
    done = run(["pytest", *options], merged=True)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
    assert "EMULATED" in done.stdout


@pytest.mark.usefixtures("session")
def test_help_of_pytest_describes_every_option() -> None:
    """The help texts are formatted with ``%``, so a single ``%`` in one of them is an error."""
    done = run(["pytest", "--help"], merged=True)
    assert done.returncode == 0, done.stdout
    assert [option for option in sorted(options()) if option not in done.stdout] == []
