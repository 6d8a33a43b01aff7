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
    found = run.text.partition(" no longer exist; remove them with --cka-memory-prune-baseline:\n")[
        2
    ]
    return [line[2:] for line in found.splitlines() if line.startswith("  test_")]


@pytest.mark.usefixtures("written")
def test_lines_without_a_test_are_listed(scripted, worker):
    """If a region, a test or a file was deleted, its lines in the baseline are listed."""
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
    """Lines of a deselected test are not gone; those of missing regions and files are."""
    run = scripted(ONE + "\ndef test_goes(cka_memory): pass", GATE, *options, *worker)
    assert _gone(run) == ["test_it.py::test_stays goes", "test_other.py::test_other"]


@pytest.mark.usefixtures("written")
def test_regions_of_a_failed_test_are_not_listed_as_gone(scripted):
    """A failed test may not have reached its regions, so their lines are not gone."""
    run = scripted(ONE + "    assert False\ndef test_goes(cka_memory): pass", GATE)
    run.assert_outcomes(passed=1, failed=1)
    assert _gone(run) == ["test_other.py::test_other"]


@pytest.mark.usefixtures("written")
def test_update_drops_missing_regions_of_tests_that_ran(scripted, baseline_path):
    """An update drops regions that tests no longer open; another branch may have missing tests."""
    run = scripted(ONE, UPDATE)
    assert "baseline: 0 regions added, 0 changed, 1 unchanged, 1 dropped in" in run.text
    assert _gone(run) == ["test_it.py::test_goes", "test_other.py::test_other"]
    assert len(regions_in(baseline_path)) == 3


@pytest.mark.usefixtures("written")
def test_lines_of_another_device_are_not_listed_as_gone(scripted, extend_conftest):
    """Lines of another device, which may run other tests, are not listed as gone."""
    extend_conftest(OTHER_DEVICE)
    assert _gone(scripted(ONE, GATE)) == []


PRUNE = "--cka-memory-prune-baseline"


def _names(path):
    return [f"{line['nodeid']} {line['label']}".rstrip() for line in regions_in(path)]


@pytest.mark.usefixtures("written")
def test_prune_removes_the_lines_that_were_listed(scripted, baseline_path, worker):
    """Pruning removes the listed lines from the file of the default name, and checks no figures."""
    run = scripted(ONE, PRUNE, *worker)
    run.assert_outcomes(passed=1)
    assert _names(baseline_path) == ["test_it.py::test_stays stays"]
    run.result.stdout.fnmatch_lines(
        [
            f"cka-memory: pruning {baseline_path}, json to *",
            f"baseline: 3 regions removed from {baseline_path}, because they no longer exist:",
            "  test_it.py::test_goes",
            "  test_it.py::test_stays goes",
            "  test_other.py::test_other",
        ]
    )
    again = scripted(ONE, PRUNE, *worker)
    assert f"baseline: no line removed from {baseline_path}" in again.text


NOT_COLLECTED = {
    "by name": ("", ["test_it.py::test_stays", "test_more.py::test_more"]),
    "by file": ("", ["test_it.py::test_stays", "test_more.py"]),
    "skipped file": ("pytest.importorskip('no_such_module')", []),
    "file that fails": ("import no_such_module", ["--continue-on-collection-errors"]),
    "ignored": ("", ["--ignore=test_it.py"]),
}


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(("line", "options"), NOT_COLLECTED.values(), ids=NOT_COLLECTED)
def test_lines_of_tests_that_were_not_collected_are_kept(
    scripted, pytester, baseline_path, line, options
):
    """If a file was not collected completely, its tests may exist, so their lines are kept."""
    pytester.makepyfile(test_more="def test_more(cka_memory, meter): pass")
    lines = _names(baseline_path)
    source = ONE.replace("import pytest", f"import pytest\n{line}", 1)
    scripted(source, PRUNE, *options)
    kept = set(_names(baseline_path))
    assert {name for name in lines if "test_it.py::test_goes" in name} <= kept


@pytest.mark.usefixtures("written")
def test_prune_keeps_lines_of_deselected_tests(scripted, pytester, baseline_path, worker):
    """Tests that -k or a path leaves out keep their lines, also files outside of the path."""
    source = ONE + "\ndef test_goes(cka_memory): pass"
    run = scripted(source, PRUNE, "-k", "stays", "test_it.py", *worker)
    run.assert_outcomes(passed=1)
    assert _names(baseline_path) == [
        "test_it.py::test_goes",
        "test_it.py::test_stays stays",
        "test_other.py::test_other",
    ]
    assert f"1 region not removed from {baseline_path}, because this session did not" in run.text


def test_prune_keeps_what_last_failed_left_out(scripted, baseline_path):
    """With --last-failed pytest collects a part of a file as if complete; lines are kept."""
    source = "def test_passes(cka_memory): pass\ndef test_fails(cka_memory): assert {}"
    scripted(source.format(True), UPDATE).assert_outcomes(passed=2)
    scripted(source.format(False)).assert_outcomes(passed=1, failed=1)
    scripted(source.format(True), PRUNE, "--last-failed").assert_outcomes(passed=1)
    assert _names(baseline_path) == ["test_it.py::test_fails", "test_it.py::test_passes"]


@pytest.mark.usefixtures("written")
def test_prune_needs_a_file(scripted, baseline_path):
    """Pruning a file that does not exist is refused: a wrong path would have no stale lines."""
    baseline_path.unlink()
    scripted(ONE, PRUNE).assert_refused("does not exist; write one with --cka-memory-update-")


@pytest.mark.usefixtures("written")
def test_prune_leaves_lines_of_other_devices(scripted, extend_conftest, baseline_path):
    """Pruning leaves the lines of other devices, which may run other tests."""
    extend_conftest(OTHER_DEVICE)
    scripted(ONE, PRUNE).assert_outcomes(passed=1)
    assert len(regions_in(baseline_path)) == 4


RENAMED = """
import pytest
@pytest.mark.memory_baseline
def test_{}(meter): meter.free(meter.allocate({}))
def test_plain(cka_memory): pass
"""


def test_renamed_test_is_named_and_keeps_its_line(scripted, baseline_path):
    """An update names a renamed test, and --cka-memory-prune-baseline gives its line the name."""
    scripted(RENAMED.format("old", 1000), UPDATE)
    run = scripted(RENAMED.format("new", 1000), PRUNE)
    told = "baseline: renamed (all figures are equal): "
    assert f"{told}test_it.py::test_old -> test_it.py::test_new" in run.text
    assert "removed" not in run.text
    assert _names(baseline_path) == ["test_it.py::test_new", "test_it.py::test_plain"]
    run = scripted(RENAMED.format("newer", 1000), UPDATE)
    assert f"{told}test_it.py::test_new -> test_it.py::test_newer" in run.text
    assert len(regions_in(baseline_path)) == 3
    run = scripted(RENAMED.format("newest", 1000), UPDATE, PRUNE)
    assert "baseline: 1 region added, 0 changed, 1 unchanged in" in run.text
    assert _names(baseline_path) == ["test_it.py::test_newest", "test_it.py::test_plain"]


def test_update_prints_what_rose_and_what_fell(scripted):
    """An update prints which figures rose and which fell, the largest rise first."""
    source = """
def test_rises(cka_memory, meter): meter.free(meter.allocate({}))
def test_falls(cka_memory, meter): meter.free(meter.allocate({}))
"""
    scripted(source.format(1000, 500), UPDATE)
    run = scripted(source.format(1060, 400), UPDATE)
    run.result.stdout.fnmatch_lines(
        [
            "baseline: 0 regions added, 2 changed, 0 unchanged in *",
            "  test_it.py::test_rises  peak increase  1000 B  ->  1.0 KB   +6.0%  up",
            "  test_it.py::test_falls  peak increase   500 B  ->   400 B  -20.0%  down",
        ]
    )
