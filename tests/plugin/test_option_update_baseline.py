"""``--cka-memory-update-baseline``: which lines are written, added, changed or kept."""

import json

import pytest
from baseline_sessions import GATE, OTHER_DEVICE, UPDATE, baseline_test, regions_in


def test_update_writes_one_line_per_region(scripted, baseline_path):
    """An update writes a line per region to the file in the root, and the summary counts them."""
    run = scripted(baseline_test(1000), UPDATE)
    run.assert_outcomes(passed=1)
    torch = json.dumps(".".join(run.report["session"]["torch"].split(".")[:2]))
    assert baseline_path.read_text("utf-8") == (
        '[ {"schema": "pytest-cka-memory-baseline/1"}\n'
        ', {"nodeid": "test_it.py::test_it", "label": "part", "device": "cpu", '
        f'"meter": "scripted figures", "torch": {torch}, "cuda": null, '
        '"peak_increase_bytes": 1000, "retained_bytes": 0, "growth_bytes_per_batch": null, '
        '"reserved_increase_bytes": null}\n'
        "]\n"
    )
    assert f"baseline: 1 region added, 0 changed, 0 unchanged in {baseline_path}" in run.text


def test_update_keeps_the_lines_of_other_devices(scripted, extend_conftest, baseline_path):
    """An update on one machine keeps the lines of another device."""
    scripted(baseline_test(10), UPDATE)
    before = regions_in(baseline_path)
    extend_conftest(OTHER_DEVICE)
    scripted(baseline_test(20), UPDATE).assert_outcomes(passed=1)
    after = regions_in(baseline_path)
    assert [region for region in after if region["device"] == "cpu"] == before
    assert [r["peak_increase_bytes"] for r in after if r["device"] == "NVIDIA H200"] == [20]


MANY = """
import pytest
pytestmark = pytest.mark.memory_baseline
def test_passes(meter): meter.allocate({0})
def test_fails(meter): meter.allocate({0}); assert {0} == 10
def test_is_skipped(meter): meter.allocate({0}); {0} == 10 or pytest.skip()
def test_in_error(meter, request):
    meter.allocate({0})
    request.addfinalizer(lambda: 10 // ({0} == 10))
@pytest.mark.xfail
def test_is_expected_to_fail(meter): meter.allocate({0}); assert {0} == 10
@pytest.mark.zero_retention
def test_breaks_another_limit(meter): {0} == 10 or meter.allocate({0})
def test_is_left_out(meter): meter.allocate({0})
"""


def test_update_only_writes_tests_that_passed(scripted, baseline_path):
    """An update writes tests that passed, and all others keep their lines."""
    scripted(MANY.format(10), UPDATE).assert_outcomes(passed=6, xpassed=1)
    before = {region["nodeid"][17:]: region for region in regions_in(baseline_path)}
    assert "is_expected_to_fail" not in before  # it did not pass as a test should
    run = scripted(MANY.format(11), UPDATE, "-k", "not left_out")
    run.assert_outcomes(passed=2, failed=2, skipped=1, errors=1, xfailed=1, deselected=1)
    changed = {region["nodeid"][17:] for region in regions_in(baseline_path)} - before.keys()
    changed |= {
        r["nodeid"][17:] for r in regions_in(baseline_path) if before[r["nodeid"][17:]] != r
    }
    assert changed == {"passes"}
    assert "baseline: 0 regions added, 1 changed, 0 unchanged in" in run.text


def test_update_does_not_check_the_old_baseline(scripted, baseline_path):
    """An update is not checked against the old baseline, or no change could be written."""
    scripted(baseline_test(10), UPDATE)
    scripted(baseline_test(10**6), UPDATE, GATE).assert_outcomes(passed=1)
    assert regions_in(baseline_path)[0]["peak_increase_bytes"] == 10**6


def test_update_without_changes_does_not_write_the_file(scripted, baseline_path):
    """If nothing changed, the file keeps its bytes, even if its layout is not the plugin's."""
    scripted(baseline_test(10), UPDATE)
    laid_out = json.dumps(json.loads(baseline_path.read_text()), indent=2)
    baseline_path.write_text(laid_out)
    run = scripted(baseline_test(10), UPDATE)
    assert "0 regions added, 0 changed, 1 unchanged" in run.text
    assert baseline_path.read_text() == laid_out


def test_update_that_measured_nothing_writes_nothing(scripted, baseline_path):
    """An update that measured nothing writes nothing, and the summary says so."""
    run = scripted("def test_plain(): pass", UPDATE)
    run.assert_outcomes(passed=1)
    assert "baseline: not written, because no measured test passed" in run.text
    assert not baseline_path.exists()


def test_collect_only_writes_nothing(scripted, baseline_path):
    """--collect-only measures nothing, so that an update writes nothing."""
    assert scripted(baseline_test(10), UPDATE, "--collect-only").result.ret == pytest.ExitCode.OK
    assert not baseline_path.exists()


def test_regions_of_the_same_label_are_numbered(scripted, baseline_path):
    """In a baseline, regions with one label have the numbers that the report gives them."""
    source = baseline_test(10) + '    with cka_memory.measure("part"): meter.allocate(7)\n'
    scripted(source, UPDATE)
    assert [(r["label"], r["retained_bytes"]) for r in regions_in(baseline_path)] == [
        ("part", 0),
        ("part #2", 7),
    ]
    scripted(source.replace("allocate(7)", "allocate(8)")).assert_outcomes(failed=1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["-n2"], ["-n2", "--dist=each"]], ids=["load", "each"])
def test_workers_write_the_same_file_as_a_serial_run(scripted, baseline_path, options):
    """The controller writes the workers' regions, to the same file as a session without workers."""
    pytest.importorskip("xdist")
    many = "import pytest\npytestmark = pytest.mark.memory_baseline\n" + "".join(
        f"def test_{n}(meter): meter.allocate({n}{{0}})\n" for n in range(1, 6)
    )
    scripted(many.format(0), UPDATE)
    serial = baseline_path.read_bytes()
    baseline_path.unlink()
    scripted(many.format(0), UPDATE, *options)
    assert baseline_path.read_bytes() == serial
    run = scripted(many.format(5), *options)
    assert {region["verdict"] for region in run.regions} == {"BREACH"}
    assert len({region["nodeid"] for region in run.regions}) == 5


def test_update_writes_the_last_run_of_a_rerun_test(scripted, baseline_path):
    """An update writes the last run of a test that was rerun, which passed."""
    pytest.importorskip("pytest_rerunfailures")
    source = """
        import pytest
        RUNS = []
        @pytest.mark.memory_baseline
        def test_it(meter):
            RUNS.append(1)
            meter.allocate(10 // len(RUNS))
            assert len(RUNS) == 2
        """
    scripted(source, UPDATE, "--reruns=1", forked=True)
    assert [region["retained_bytes"] for region in regions_in(baseline_path)] == [5]
