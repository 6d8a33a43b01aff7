"""Regions that fixtures measure, with ``cka_memory_session`` or a ``MemoryProbe``."""

import json

import pytest

CONFTEST = """
from pytest_cka_memory import MemoryProbe

@pytest.fixture(scope="session")
def model(cka_memory_session):
    with cka_memory_session.measure("load"):
        METER.allocate(1000)
    yield "model"
    with cka_memory_session.measure("unload"):
        METER.free(METER.allocate(70))

@pytest.fixture(scope="module")
def data():
    probe = MemoryProbe(meter=METER)
    with probe.measure("read"):
        METER.allocate(20)
    with probe.measure("read"):
        METER.allocate(30)

@pytest.fixture(params=["a", "b"])
def batch(cka_memory_session):
    cka_memory_session.run(METER.allocate, 5)
"""
TESTS = """
from pytest_cka_memory import MemoryProbe

def test_model(model, meter): assert model == "model"
def test_again(model, data, meter, cka_memory): meter.allocate(7)
def test_batch(batch): pass
def test_own_region(cka_memory_session, meter):
    with cka_memory_session.measure("inside"):
        meter.allocate(9)
    with MemoryProbe(meter=meter).measure("unseen"):
        pass
"""
REGIONS = {
    ("test_it.py::test_again", ""): 7,
    ("test_it.py::test_batch[a]", "allocate (fixture batch)"): 5,
    ("test_it.py::test_batch[b]", "allocate (fixture batch)"): 5,
    ("test_it.py::test_own_region", "inside"): 9,
    ("conftest.py::model (session fixture)", "load"): 1000,
    ("conftest.py::model (session fixture)", "unload"): 0,
    ("test_it.py::data (module fixture)", "read"): 20,
    ("test_it.py::data (module fixture)", "read #2"): 30,
}


def _regions(run):
    return {(r["nodeid"], r["label"]): r["retained_bytes"] for r in run.regions}


def test_regions_of_fixtures_are_reported(scripted, extend_conftest, workers):
    """Regions of fixtures are reported with the fixture's name, or
    its only test's, on any worker.
    """
    extend_conftest(CONFTEST)
    run = scripted(TESTS, *workers)
    run.assert_outcomes(passed=5)
    assert _regions(run) == REGIONS
    assert {region["verdict"] for region in run.regions} == {"no limit"}
    assert {region["outcome"] for region in run.regions} == {"passed"}


def test_table_and_baseline_have_the_regions_of_fixtures(scripted, extend_conftest, baseline_path):
    """A baseline is the only limit on a fixture's region; a breach
    fails the session, not a test.
    """
    extend_conftest(CONFTEST)
    model = "def test_model(model, data): pass"
    scripted(model, "--cka-memory-update-baseline")
    assert len(json.loads(baseline_path.read_text("utf-8"))) == 1 + 4
    gate = (f"--cka-memory-baseline={baseline_path}", "--cka-memory-prune-baseline")
    run = scripted(model, *gate, "--cka-memory-report", "--cka-memory-max-retained-mb=0")
    run.assert_outcomes(passed=1)
    assert run.result.ret == pytest.ExitCode.OK
    lines = ["conftest.py", "  model (*) load *1000 B * ok", "*no line removed from*"]
    run.result.stdout.fnmatch_lines(lines)
    extend_conftest("_allocate = METER.allocate\nMETER.allocate = lambda n: _allocate(2 * n)\n")
    run = scripted(model, *gate)
    run.assert_outcomes(passed=1)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    name = "conftest.py::model (session fixture) load"
    assert f"FAILED: {name}: --cka-memory-baseline: retained 2,000 bytes, allowed 1,0" in run.text


def test_region_of_a_fixture_that_fails_is_not_judged(scripted, extend_conftest):
    """The region of a fixture that fails is not judged; its test has the error."""
    extend_conftest(CONFTEST.replace("METER.allocate(1000)", "raise RuntimeError('no weights')"))
    run = scripted("def test_model(model): pass")
    run.assert_outcomes(errors=1)
    assert run.region["verdict"] == "not judged"
    assert run.region["outcome"] == "error"


def test_region_open_over_all_tests_ends_with_its_fixture(scripted, extend_conftest):
    """A session's fixture may keep a region open over all tests, which are measured as usual.

    A region that is never ended or begun is an error.
    """
    extend_conftest(
        """
OPEN = []
@pytest.fixture(scope="session", autouse=True)
def everything(cka_memory_session):
    with cka_memory_session.measure("everything"):
        yield
@pytest.fixture(scope="session")
def forgets(cka_memory_session):
    OPEN.append(cka_memory_session.measure("left open"))
    OPEN[0].__enter__()
    cka_memory_session.measure("not begun")
"""
    )
    run = scripted(
        "def test_one(cka_memory, meter): meter.allocate(3)\n"
        "def test_two(forgets, cka_memory, meter): meter.allocate(4)"
    )
    run.assert_outcomes(passed=2, errors=1)
    found = {r["label"]: (r["retained_bytes"], r["completed"]) for r in run.regions if r["label"]}
    assert found == {"everything": (7, True), "left open": (4, False)}
    assert [r["retained_bytes"] for r in run.regions if not r["label"]] == [3, 4]
    assert "region 'left open' was never closed, so it was not judged" in run.text
    assert "measure('not begun')" in run.text
    (left,) = [r["nodeid"] for r in run.regions if r["label"] == "left open"]
    assert left == "pytest_cka_memory.plugin.entry_point::cka_memory_session (session fixture)"


def test_probe_on_another_device_is_counted_as_not_measured(scripted, extend_conftest):
    """One report has one device, so a probe on another one counts as not measured."""
    extend_conftest(
        """
from pytest_cka_memory import MemoryProbe
@pytest.fixture(scope="session")
def other():
    meter = ScriptedMeter()
    meter.device, meter.device_name = "cuda:1", "another card"
    with MemoryProbe(meter=meter).measure("there"):
        pass
"""
    )
    run = scripted("def test_it(other, cka_memory): pass", "--cka-memory-report")
    run.assert_outcomes(passed=1)
    assert [region["label"] for region in run.regions] == [""]
    assert (
        "1 not measured: region 'there' of a MemoryProbe on cuda:1 in fixture other, because this "
        "session measures cpu"
    ) in " ".join(run.text.split())


def test_fixture_requested_while_a_test_runs_starts_the_plugin(scripted):
    """If a running test requests the session's fixture, the plugin starts then."""
    run = scripted(
        """
        def test_it(request, meter):
            with request.getfixturevalue("cka_memory_session").measure("late"):
                meter.allocate(8)
        """,
        writes_json=False,
    )
    run.assert_outcomes(passed=1)


def test_rerun_test_keeps_the_regions_of_its_last_run(scripted, extend_conftest):
    """A rerun test keeps its last run's regions; a fixture of the session runs only once."""
    pytest.importorskip("pytest_rerunfailures")
    extend_conftest(CONFTEST)
    run = scripted(
        """
        RUNS = []
        def test_it(model, batch):
            RUNS.append(1)
            assert len(RUNS) != 1
        """,
        "--reruns=1",
    )
    run.assert_outcomes(passed=2)
    names = [(r["nodeid"], r["label"]) for r in run.regions]
    assert len(names) == len(set(names)) == 4
