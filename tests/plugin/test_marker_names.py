"""A marker that is nearly one of ours is refused: otherwise it would limit nothing."""

import pytest

from pytest_cka_memory.plugin.marker_names import _nearest

NEARLY_OURS = {
    "max_peak": "max_peak_mb(512)",
    "zero_retenton": "zero_retention",
    "Zero_Retention": "zero_retention",
    "max_retained": "max_retained_mb(1)",
    "max_reserve_mb": "max_reserved_mb(1024)",
    "flat_per_batches": "flat_per_batch(tolerance_mb=0.0, warmup=1)",
    "allow_no_allocation": "allow_no_allocations",
    "memory_baselines": 'memory_baseline(tolerance="5%")',
}
SOURCE = """
import pytest

pytestmark = pytest.mark.slow

@pytest.mark.max_peak_gb(5)
class TestOfClass:
    @pytest.mark.zero_retenton
    def test_a(self): pass
    def test_b(self): pass

@pytest.mark.skip
@pytest.mark.memory
@pytest.mark.max_peak_mib
def test_c(): pass
"""
REGISTERED = "[pytest]\nmarkers =\n  max_peak_gb(size): mine\n  max_peak_mib : mine\n"


@pytest.mark.parametrize("name", NEARLY_OURS)
def test_misspelled_name_is_recognised(name):
    """A misspelled marker is recognised by its ending, a missing letter, or capitals."""
    assert NEARLY_OURS[name].partition("(")[0] in _nearest(name)


@pytest.mark.parametrize(
    "name", ["slow", "memory", "max_memory", "zero", "flat", "peak", "baseline", "limit_memory"]
)
def test_other_names_are_left_alone(name):
    """Markers of other plugins are left alone, such as ``limit_memory`` of pytest-memray."""
    assert _nearest(name) == []


def test_misspelled_markers_stop_the_session_and_name_a_test(scripted, pytester):
    """A misspelled marker stops the session, also if nothing else is to be measured.

    Names that a project has registered are accepted.
    """
    pytester.makepyprojecttoml("")
    run = scripted(SOURCE, writes_json=False)
    run.assert_refused(
        "ERROR: test_it.py::TestOfClass::test_a and 1 more: there is no marker 'max_peak_gb'; did "
        "you mean @pytest.mark.max_peak_mb(512)? If 'max_peak_gb' is a marker of your own, add it "
        "to the ini key 'markers'",
        "ERROR: test_it.py::TestOfClass::test_a: there is no marker 'zero_retenton'; did you mean "
        "@pytest.mark.zero_retention?",
        "ERROR: test_it.py::test_c: there is no marker 'max_peak_mib'",
    )
    pytester.makeini(REGISTERED)
    refused = scripted(SOURCE)
    refused.assert_refused("there is no marker 'zero_retenton'")
    assert "'max_peak" not in refused.text + refused.errors
    scripted(None, "-k", "test_b or test_c").assert_outcomes(passed=1, skipped=1, deselected=1)
    assert scripted(None, "--collect-only").result.ret == pytest.ExitCode.OK


def test_misspelled_marker_in_a_worker_is_an_error_of_its_test(scripted, pytester):
    """A worker cannot stop the session, so the test does not run, and the others do."""
    pytest.importorskip("xdist")
    pytester.makeini(REGISTERED)
    run = scripted(SOURCE, "-n1")
    run.assert_outcomes(passed=1, errors=1, skipped=1)
    assert "TestOfClass::test_a: there is no marker 'zero_retenton'; did you mean" in run.text
