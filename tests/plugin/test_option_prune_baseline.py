"""Lines of a baseline whose tests or regions no longer exist."""

import pytest
from baseline_sessions import GATE, OTHER_DEVICE, UPDATE, regions_in

TWO = """
import pytest
def test_stays(cka_memory, meter):
    with cka_memory.measure("stays"): pass
    with cka_memory.measure("goes"): pass
def test_goes(cka_memory): pass
"""


ONE = TWO.split('    with cka_memory.measure("goes")')[0]


@pytest.fixture
def written(scripted, pytester, baseline_path):
    """A baseline with three regions of one test file, and one of a file that was deleted."""
    pytester.makepyfile(test_other="def test_other(cka_memory): pass")
    scripted(TWO, UPDATE, "test_it.py", "test_other.py")
    (pytester.path / "test_other.py").unlink()
    assert len(regions_in(baseline_path)) == 4


def _gone(run):
    """Return the lines that the summary lists as gone."""
    found = run.text.partition(" no longer exist; delete their lines:\n")[2]
    return [line[2:] for line in found.splitlines() if line.startswith("  test_")]


@pytest.mark.usefixtures("written")
def test_lines_without_a_test_are_listed(scripted, worker):
    """A region, a test and a test file were deleted."""
    run = scripted(ONE, GATE, *worker)
    run.assert_outcomes(passed=1)
    assert _gone(run) == [
        "test_it.py::test_goes",
        "test_it.py::test_stays goes",
        "test_other.py::test_other",
    ]


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    "options",
    [["-k", "stays"], ["test_it.py::test_stays"], ["--deselect", "test_it.py::test_goes"]],
)
def test_lines_of_deselected_tests_are_not_listed_as_gone(scripted, options, worker):
    """Only a missing region of a test that ran and a missing file are listed."""
    run = scripted(ONE + "\ndef test_goes(cka_memory): pass", GATE, *options, *worker)
    assert _gone(run) == ["test_it.py::test_stays goes", "test_other.py::test_other"]


@pytest.mark.usefixtures("written")
def test_regions_of_a_failed_test_are_not_listed_as_gone(scripted):
    """It may have failed before it reached them."""
    run = scripted(ONE + "    assert False\ndef test_goes(cka_memory): pass", GATE)
    run.assert_outcomes(passed=1, failed=1)
    assert _gone(run) == ["test_other.py::test_other"]


@pytest.mark.usefixtures("written")
def test_update_drops_missing_regions_of_tests_that_ran(scripted, baseline_path):
    """Missing tests are only listed because another branch may still have them."""
    run = scripted(ONE, UPDATE)
    assert "baseline: 0 regions added, 0 changed, 1 unchanged, 1 dropped in" in run.text
    assert _gone(run) == ["test_it.py::test_goes", "test_other.py::test_other"]
    assert len(regions_in(baseline_path)) == 3


@pytest.mark.usefixtures("written")
def test_lines_of_another_device_are_not_listed_as_gone(scripted, extend_conftest):
    """Another device may run other tests."""
    extend_conftest(OTHER_DEVICE)
    assert _gone(scripted(ONE, GATE)) == []
