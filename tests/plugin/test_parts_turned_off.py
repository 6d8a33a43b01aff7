"""Sessions without the plugin, torch, the terminal, the cache, or a test."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from pytest_cka_memory.plugin.reporter import owners_of_cka

NO_TORCH = """
import sys
import pytest

def pytest_sessionfinish():
    assert "torch" not in sys.modules, "torch was imported"
    assert not any(name.startswith("torch.") for name in sys.modules)

def pytest_unconfigure():
    print("no torch:", "torch" not in sys.modules)
"""
PLAIN = """
import pytest

def test_it(): assert "torch" not in __import__("sys").modules

@pytest.mark.parametrize("n", range(2))
def test_more(n): pass
"""
MARKED = """
import pytest

@pytest.mark.zero_retention
@pytest.mark.max_retained_mb(-1)
def test_it(): pass
"""
SKIPPED = """
import pytest

@pytest.mark.skip
@pytest.mark.zero_retention
def test_it(): import torch

@pytest.mark.xfail(run=False)
def test_not_run(cka_memory): import torch
"""


def test_two_installed_packages_named_cka_give_a_warning(scripted, pytester, monkeypatch):
    """If two packages named cka are installed, it is undefined which is imported: one warning."""
    site = pytester.mkdir("site")
    (site / "cka").mkdir()
    (site / "cka" / "__init__.py").touch()
    for name in ("one-cka", "other-cka"):
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "top_level.txt").write_text("cka\n")
    monkeypatch.syspath_prepend(site)
    run = scripted(PLAIN, "--cka-memory-report")
    assert run.text.count("warning: package 'cka' is installed by ") == 1
    assert " by one-cka and by other-cka" in run.text


def test_distributions_are_not_read_if_there_is_one_package_named_cka(monkeypatch):
    """Distributions are read only if two packages are named cka, because that takes 70 ms."""
    tests = Path(__file__).parents[1]  # has a folder cka, which is not a package
    monkeypatch.setattr(sys, "path", [str(tests.parent), str(tests)])
    monkeypatch.setattr(metadata, "packages_distributions", lambda: pytest.fail("read"))
    assert owners_of_cka() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "options"),
    [
        pytest.param(PLAIN, [], id="unmarked"),
        pytest.param(PLAIN, ["--cka-memory-json=r.json"], id="json"),
        pytest.param(PLAIN, ["--cka-memory-device=cpu"], id="cpu-named"),
        pytest.param(PLAIN, ["-n2"], id="xdist"),
        pytest.param(SKIPPED, ["--cka-memory-report"], id="all-skipped"),
        pytest.param(PLAIN, ["--cka-memory-report", "--collect-only"], id="collect-only"),
        pytest.param(PLAIN, ["--markers"], id="markers"),
        pytest.param("", ["--cka-memory-min-regions=1"], id="no-tests"),
    ],
)
def test_torch_is_not_imported_if_nothing_is_measured(session, pytester, source, options):
    """Neither a controller nor a worker imports torch unless it measures."""
    pytester.makeconftest(NO_TORCH)
    run = session(source, *options, subprocess=True, writes_json=False)
    assert "torch was imported" not in run.text + run.errors
    assert "no torch: True" in run.text
    assert run.result.ret in (0, 1 if "--cka-memory-min-regions=1" in options else 0)


def test_scripted_meter_does_not_import_torch(scripted, extend_conftest):
    """If a meter does not need torch, measuring does not import it."""
    extend_conftest(NO_TORCH)
    source = "def test_it(cka_memory, meter): meter.allocate(1)"
    run = scripted(source, "--cka-memory-report", subprocess=True)
    run.assert_outcomes(passed=1)
    assert "no torch: True" in run.text
    assert run.report["session"]["torch"] is None
    run.result.stdout.fnmatch_lines(["device: cpu (no device), torch not imported"])


def test_without_the_plugin_markers_are_unknown(session):
    """-p no:cka_memory turns the whole plugin off; wrong arguments are not checked."""
    # The process that forks has imported the plugin, of which pytest warns in some installations.
    imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    run = session(MARKED, "-p", "no:cka_memory", *imported, forked=True, writes_json=False)
    run.assert_outcomes(passed=1, warnings=2)
    assert "Unknown pytest.mark.zero_retention" in run.text


def test_without_the_plugin_its_fixture_is_missing(session):
    """Without the plugin its fixture is missing, which is an error in a test that requests it."""
    run = session("def test_it(cka_memory): pass", "-p", "no:cka_memory", writes_json=False)
    run.assert_outcomes(errors=1)
    assert "fixture 'cka_memory' not found" in run.text


ONE_OF_TWO_LEAKS = """
import pytest
@pytest.mark.zero_retention
@pytest.mark.parametrize("size", [0, 1])
def test_it(meter, size): meter.allocate(size)
"""
NO_CACHE = ["-p", "no:cacheprovider"]
NO_REPORTS = ["-p", "no:junitxml", "-p", "no:logging", "-p", "no:skipping"]
NO_OTHER_TESTS = ["-p", "no:warnings", "-p", "no:unittest", "-p", "no:doctest"]
VERY_QUIET = ["-qq", "--tb=no", "--no-header", "--no-summary"]


@pytest.mark.parametrize(
    "options",
    [
        NO_CACHE,
        ["-p", "no:terminal"],
        NO_REPORTS,
        NO_OTHER_TESTS,
        ["-q"],
        VERY_QUIET,
        ["--tb=no"],
        ["-vv", "-rA"],
        ["--import-mode=importlib"],
        ["-s"],
    ],
    ids="_".join,
)
def test_other_parts_of_pytest_may_be_turned_off(scripted, options):
    """Without pytest's own plugins, verdicts and the JSON report are the same."""
    assert_verdicts(scripted(ONE_OF_TWO_LEAKS, *options))


@pytest.mark.parametrize(
    "options",
    [
        [*NO_CACHE, *NO_REPORTS, "-q", "--tb=no"],
        [*NO_OTHER_TESTS, *VERY_QUIET, "--import-mode=importlib"],
        ["-vv", "-rA", "-s"],
    ],
    ids="_".join,
)
def test_other_parts_of_pytest_may_be_turned_off_with_a_worker(scripted, options):
    """With a worker pytest's plugins may be off, except the terminal, which xdist requires."""
    pytest.importorskip("xdist")
    assert_verdicts(scripted(ONE_OF_TWO_LEAKS, *options, "-n1"))


def assert_verdicts(run):
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in run.text + run.errors
    assert [r["verdict"] for r in run.regions] == ["ok", "BREACH"]


@pytest.mark.parametrize(
    "option", ["--collect-only", "--fixtures", "--fixtures-per-test", "--cache-show"]
)
def test_sessions_that_run_no_test_write_no_report(scripted, option):
    """A session that runs no test writes no report and prints nothing about measurements."""
    options = [option, "--cka-memory-report", "--cka-memory-min-regions=1"]
    run = scripted("def test_it(cka_memory): pass", *options)
    assert run.result.ret == pytest.ExitCode.OK
    assert run.report is None
    for text in ("nothing was measured", "no result", "figures written", "FAILED"):
        assert text not in run.text


def test_loading_the_plugin_imports_no_large_module(pytester):
    """Loading the plugin imports neither torch nor numpy."""
    result = pytester.runpython_c(
        "import sys, pytest_cka_memory.plugin.entry_point, pytest_cka_memory.testing;"
        "large = {'torch', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules);"
        "assert not large, large"
    )
    assert result.ret == 0
