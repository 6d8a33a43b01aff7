"""What the pages say about their examples, beyond what the examples show."""

from pathlib import Path

import pytest
from docs_pages import block_noted
from docs_process import run
from test_links import options


@pytest.mark.usefixtures("session")
def test_readme_example_passes_when_its_advice_is_followed() -> None:
    """The page says so below the failure."""
    example = block_noted("file: tests/test_evaluation.py").text
    assert example.count(".mean()") == 1
    fixed = example.replace(".mean()", ".mean().item()")
    Path("test_evaluation.py").write_text(fixed, "utf-8")
    status, printed = run(["pytest"])
    assert (status, "1 passed" in printed) == (0, True), printed


@pytest.mark.predicts
@pytest.mark.usefixtures("session")
def test_example_of_the_fixture_is_predicted_as_well() -> None:
    """The same test, on fake tensors."""
    example = block_noted("file: test_fixture_by_example.py").text
    Path("test_fixture_by_example.py").write_text(example, "utf-8")
    options = "--cka-memory-device=predict:cuda", "--cka-memory-report"
    status, printed = run(["pytest", *options])
    assert (status, "1 passed" in printed) == (0, True), printed
    assert "PREDICTED" in printed


@pytest.mark.usefixtures("session")
def test_help_of_pytest_describes_every_option() -> None:
    """The help texts are formatted with ``%``, so a single ``%`` in one of them is an error."""
    status, printed = run(["pytest", "--help"])
    assert status == 0, printed
    assert [option for option in sorted(options()) if option not in printed] == []
