"""Hooks that other plugins implement: limits for tests, fields for regions, told whose they are."""

import pytest

BOTH = pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "parallel"])

LIMITS = """
from dataclasses import dataclass
from pytest_cka_memory.limits import Breach, Limit, Unjudged, max_retained_mb


@dataclass(frozen=True)
class Even(Limit):
    def judge(self, record):
        if record.retained_bytes == 4:
            return Unjudged(self.text, "four is neither")
        if record.retained_bytes % 2 == 0:
            return None
        return Breach(self.text, 0, 1, f"{record.retained_bytes} is odd", "retained_bytes")


def pytest_cka_memory_limits(item):
    if "limited" in item.keywords:
        return [max_retained_mb("4 B")]
    if item.name.startswith("test_even"):
        return [Even("even")]
"""
TESTS = """
import pytest

@pytest.mark.limited
@pytest.mark.parametrize("size", [4, 5])
def test_limited(meter, size): meter.allocate(size)

@pytest.mark.parametrize("size", [2, 3, 4])
def test_even(meter, size): meter.allocate(size)

def test_other(meter): meter.allocate(7)
"""


@pytest.fixture
def extended(scripted, pytester):
    """Run tests with a conftest that also implements hooks."""

    def run(hooks, source, *args):
        conftest = pytester.path / "conftest.py"
        conftest.write_text(conftest.read_text("utf-8") + hooks, "utf-8")
        pytester.makeini("[pytest]\nmarkers = limited\n")
        return scripted(source, *args)

    return run


@BOTH
def test_a_limit_of_another_plugin_is_one_like_any_other(extended, workers):
    """Its test is measured and judged, at the same boundary; others are left alone."""
    run = extended(LIMITS, TESTS, *workers)
    run.outcomes(passed=4, failed=2)
    assert {r["nodeid"].rpartition("::")[2]: r["verdict"] for r in run.regions} == {
        "test_limited[4]": "ok",
        "test_limited[5]": "BREACH",
        "test_even[2]": "ok",
        "test_even[3]": "BREACH",
        "test_even[4]": "not judged",
    }
    assert "max_retained_mb('4 B') broken: retained 5 bytes, allowed 4 bytes" in run.text
    assert "even broken: 3 is odd" in run.text
    run.result.stdout.fnmatch_lines(["not judged: even, four is neither*"])


def test_it_stands_beside_markers_and_replaces_the_sessions(extended):
    """The test's own markers and the plugin's limits all hold; an option's gives way."""
    source = """
        import pytest

        @pytest.mark.limited
        @pytest.mark.max_peak_mb(1)
        def test_it(meter): meter.allocate(3)

        def test_plain(meter): pass
        """
    run = extended(LIMITS, source, "--cka-memory-max-retained-mb=9")
    assert run.of("test_it")["limits"] == ["max_peak_mb(1)", "max_retained_mb('4 B')"]
    assert run.of("test_plain")["limits"] == ["--cka-memory-max-retained-mb=9"]


def test_a_limit_is_asked_for_once_a_test(extended, pytester):
    """However many regions are judged by it."""
    hooks = """
import pathlib

def pytest_cka_memory_limits(item):
    with open("asked", "a") as file:
        print(item.name, file=file)
    return []
"""
    source = """
        import pytest

        @pytest.mark.zero_retention
        def test_it(cka_memory):
            for n in range(3):
                with cka_memory.measure(): pass

        def test_plain(): pass
        """
    extended(hooks, source).outcomes(passed=2)
    assert (pytester.path / "asked").read_text("utf-8").split() == ["test_it", "test_plain"]


def test_a_conftest_sets_limits_for_its_own_folder(extended, pytester):
    """As its fixtures and other hooks are for the tests beside it and below."""
    for folder in ("one", "two"):
        (pytester.path / folder).mkdir()
        (pytester.path / folder / f"test_{folder}.py").write_text(
            "def test_it(meter): meter.allocate(5)\n", "utf-8"
        )
    (pytester.path / "one" / "conftest.py").write_text(
        "from pytest_cka_memory.limits import zero_retention\n"
        "def pytest_cka_memory_limits(item): return [zero_retention()]\n",
        "utf-8",
    )
    run = extended("", None)
    run.outcomes(passed=1, failed=1)
    assert run.region["nodeid"] == "one/test_one.py::test_it"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("5", "returned 5; return a list of limits"),
        ("[5]", "returned [5]; return a list of limits"),
        ("{}", "returned {}; return a list of limits"),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("[max_retained_mb(-1)]", "raised SizeError: a memory size cannot be -1"),
    ],
)
def test_what_is_no_limit_is_refused_by_the_name_of_its_plugin(extended, returned, message):
    """Before any test runs: a limit that is lost would be a silent pass."""
    hooks = f"""
from pytest_cka_memory.limits import max_retained_mb

def pytest_cka_memory_limits(item): return {returned}
"""
    run = extended(hooks, "def test_it(): pass")
    run.refused("test_it.py::test_it: ", "conftest.py: pytest_cka_memory_limits ", message)


def test_in_a_worker_it_is_an_error_of_its_test(extended):
    """Which cannot refuse to start."""
    run = extended("\ndef pytest_cka_memory_limits(item): return 5\n", "def test_it(): pass", "-n1")
    run.outcomes(errors=1)
    run.result.stdout.fnmatch_lines(["*conftest.py: pytest_cka_memory_limits returned 5*"])


@BOTH
@pytest.mark.parametrize(
    ("judged", "message"),
    [
        ("True", "judged True; return None, an Unjudged, or a Breach"),
        ("Breach(self.text, 0, float('nan'), 'm', 'f')", "judged Breach("),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
    ids=["bool", "nan", "raises"],
)
def test_a_wrong_verdict_is_no_pass(extended, judged, message, workers):
    """It fails its test, in a line that names plugin, hook and limit."""
    hooks = f"""
from dataclasses import dataclass
from pytest_cka_memory.limits import Breach, Limit

class Odd(Limit):
    def judge(self, record): return {judged}

def pytest_cka_memory_limits(item): return [Odd("odd")]
"""
    run = extended(hooks, "def test_it(): pass", *workers)
    run.outcomes(failed=1)
    run.result.stdout.fnmatch_lines(
        [f"*conftest.py: pytest_cka_memory_limits: limit odd {message}*"]
    )
    assert "extensions.py" not in run.text


FIELDS = """
def pytest_cka_memory_region(item, result):
    if result.record.label == "plain":
        return None
    return {"twice": 2 * result.record.retained_bytes, "verdict": result.verdict, "of": [item.name]}
"""


@BOTH
def test_a_field_rides_along_to_the_report(extended, workers):
    """From the process that measured, with the figures and the verdict in hand."""
    source = """
        import pytest

        @pytest.mark.max_retained_mb("4 B")
        @pytest.mark.parametrize("size", [4, 5])
        def test_it(meter, size): meter.allocate(size)

        def test_plain(cka_memory):
            with cka_memory.measure("plain"): pass
        """
    run = extended(FIELDS, source, *workers)
    run.outcomes(passed=2, failed=1)
    assert run.of("test_it[4]")["extra"] == {"twice": 8, "verdict": "ok", "of": ["test_it[4]"]}
    assert run.of("test_it[5]")["extra"]["verdict"] == "BREACH"
    assert "extra" not in run.of("test_plain")


def test_several_plugins_add_their_fields(extended):
    """Side by side, a conftest's and a plugin's."""
    plugin = """
class Other:
    def pytest_cka_memory_region(self, result): return {"other": None}

def pytest_configure(config): config.pluginmanager.register(Other(), "other")
"""
    run = extended(FIELDS + plugin, "def test_it(cka_memory): pass")
    assert set(run.region["extra"]) == {"twice", "verdict", "of", "other"}


@BOTH
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("5", "returned 5; return a dict of fields, or None"),
        ("{'x': object}", "returned 'x': <class 'object'>; fields are texts, finite numbers"),
        ("{'x': float('inf')}", "returned 'x': inf; fields are"),
        ("{'x': {1: 2}}", "returned 'x': {1: 2}; fields are"),
        ("{1: 2}", "returned 1: 2; fields are"),
        (f"{{'x': {'[' * 21 + ']' * 21}}}", "returned 'x': [[[[["),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
    ],
    ids=["no-dict", "object", "infinite", "inner-key", "key", "deep", "raises"],
)
def test_a_field_that_cannot_be_reported_fails_its_test(extended, returned, message, workers):
    """In a line that names plugin and hook; the figures are reported without it."""
    hooks = f"\ndef pytest_cka_memory_region(item): return {returned}\n"
    run = extended(hooks, "def test_it(cka_memory, meter): meter.allocate(3)", *workers)
    run.outcomes(failed=1)
    assert f"conftest.py: pytest_cka_memory_region {message}" in run.text
    assert run.region["retained_bytes"] == 3
    assert "extra" not in run.region


def test_a_field_of_two_plugins_is_refused(extended):
    """One of them would be lost."""
    plugin = """
class Other:
    def pytest_cka_memory_region(self, result): return {"twice": 1}

def pytest_configure(config): config.pluginmanager.register(Other(), "other")
"""
    run = extended(FIELDS + plugin, "def test_it(cka_memory): pass")
    run.outcomes(failed=1)
    assert "returned 'twice', which another plugin has returned too" in run.text


def test_a_failure_of_the_tests_own_goes_first(extended):
    """A plugin's mistake hides neither an exception nor a breach."""
    source = """
        import pytest

        def test_raises(cka_memory): raise ValueError("its own")

        @pytest.mark.zero_retention
        def test_breaks(meter): meter.allocate(1)
        """
    run = extended("\ndef pytest_cka_memory_region(item): return 5\n", source)
    run.outcomes(failed=2)
    assert "ValueError: its own" in run.text
    broken, wrong = run.text.index("zero_retention broken"), run.text.index("returned 5; return")
    assert broken < wrong


@BOTH
def test_a_device_may_be_another_plugins(session, pytester, workers):
    """Its meter answers for a name, the plugin for the others; reports name it."""
    pytester.makeconftest(
        """
        from pytest_cka_memory.testing import ScriptedMeter

        class Toaster(ScriptedMeter):
            device_name = "toaster"

        def pytest_cka_memory_meter(config, device):
            return Toaster() if device == "privateuseone" else None
        """
    )
    run = session("def test_it(cka_memory): pass", "--cka-memory-device=privateuseone", *workers)
    run.outcomes(passed=1)
    assert run.report["session"]["device_name"] == "toaster"
