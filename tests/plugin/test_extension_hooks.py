"""Hooks that other plugins implement: limits for tests, fields for regions, meters for devices."""

import pytest

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
def with_hooks(scripted, pytester, extend_conftest):
    """Run tests with a conftest that also implements `hooks`."""

    def run(hooks, source, *args):
        extend_conftest(hooks)
        pytester.makeini("[pytest]\nmarkers = limited\n")
        return scripted(source, *args)

    return run


def test_limit_of_another_plugin_is_judged(with_hooks, worker):
    """Tests that get a limit from another plugin are measured and judged; others are not."""
    run = with_hooks(LIMITS, TESTS, *worker)
    run.assert_outcomes(passed=4, failed=2)
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


def test_limit_of_another_plugin_adds_to_markers_and_replaces_options(with_hooks):
    """A test's own markers and a plugin's limits all apply, and an option's limit does not."""
    source = """
        import pytest

        @pytest.mark.limited
        @pytest.mark.max_peak_mb(1)
        def test_it(meter): meter.allocate(3)

        def test_plain(meter): pass
        """
    run = with_hooks(LIMITS, source, "--cka-memory-max-retained-mb=9")
    assert run.region_of("test_it")["limits"] == ["max_peak_mb(1)", "max_retained_mb('4 B')"]
    assert run.region_of("test_plain")["limits"] == ["--cka-memory-max-retained-mb=9"]


def test_limits_hook_is_called_once_per_test(with_hooks, pytester):
    """The hook for limits is called once per test, and not again for each region."""
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
    with_hooks(hooks, source).assert_outcomes(passed=2)
    assert (pytester.path / "asked").read_text("utf-8").split() == ["test_it", "test_plain"]


def test_conftest_sets_limits_for_its_own_folder(with_hooks, pytester):
    """Limits of a conftest apply to the tests in its folder and below, like fixtures."""
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
    run = with_hooks("", None)
    run.assert_outcomes(passed=1, failed=1)
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
def test_invalid_limits_are_refused_and_name_their_plugin(with_hooks, returned, message):
    """An invalid limit of a hook ends the session before any test, which would pass unchecked."""
    hooks = f"""
from pytest_cka_memory.limits import max_retained_mb

def pytest_cka_memory_limits(item): return {returned}
"""
    run = with_hooks(hooks, "def test_it(): pass")
    run.assert_refused("test_it.py::test_it: ", "conftest.py: pytest_cka_memory_limits ", message)


def test_invalid_limits_in_a_worker_are_an_error_of_the_test(with_hooks):
    """A worker cannot refuse to start, so an invalid limit is an error of the test there."""
    run = with_hooks(
        "\ndef pytest_cka_memory_limits(item): return 5\n", "def test_it(): pass", "-n1"
    )
    run.assert_outcomes(errors=1)
    run.result.stdout.fnmatch_lines(["*conftest.py: pytest_cka_memory_limits returned 5*"])


INVALID_VERDICTS = {
    "bool": ("True", "returned True; return None, Unjudged(...) or Breach(...)"),
    "nan": (
        "Breach(limit.text, 0, float('nan'), 'm', 'f')",
        "returned Breach(*each size a finite int or float*",
    ),
    "raises": ("1 / 0", "raised ZeroDivisionError"),
}


@pytest.mark.parametrize(("name", "message"), [(n, m) for n, (_, m) in INVALID_VERDICTS.items()])
def test_limit_with_an_invalid_verdict_fails_the_test(
    with_hooks, finished_sessions, name, message, worker
):
    """If a limit returns an invalid verdict, one line names the plugin, the hook and the limit."""
    key = ("verdicts", *worker)
    if key not in finished_sessions:
        judged = (
            f"    '{n}': lambda limit: {value},\n" for n, (value, _) in INVALID_VERDICTS.items()
        )
        hooks = f"""
from dataclasses import dataclass
from pytest_cka_memory.limits import Breach, Limit

JUDGED = {{
{"".join(judged)}
}}

class Odd(Limit):
    def judge(self, record): return JUDGED[self.text](self)

def pytest_cka_memory_limits(item): return [Odd(item.name.removeprefix("test_"))]
"""
        source = "".join(f"def test_{n}(): pass\n" for n in INVALID_VERDICTS)
        finished_sessions[key] = with_hooks(hooks, source, *worker)
    run = finished_sessions[key]
    run.assert_outcomes(failed=len(INVALID_VERDICTS))
    run.result.stdout.fnmatch_lines(
        [f"*conftest.py: pytest_cka_memory_limits: limit {name} {message}*"]
    )
    assert "pytest_cka_memory/" not in run.text  # no traceback of the plugin


FIELDS = """
def pytest_cka_memory_region(item, result):
    if result.record.label == "plain":
        return None
    return {"twice": 2 * result.record.retained_bytes, "verdict": result.verdict, "of": [item.name]}
"""


def test_extra_fields_are_in_the_report(with_hooks, worker):
    """A hook in the measuring process gets figures and verdict, and its fields are reported."""
    source = """
        import pytest

        @pytest.mark.max_retained_mb("4 B")
        @pytest.mark.parametrize("size", [4, 5])
        def test_it(meter, size): meter.allocate(size)

        def test_plain(cka_memory):
            with cka_memory.measure("plain"): pass
        """
    run = with_hooks(FIELDS, source, *worker)
    run.assert_outcomes(passed=2, failed=1)
    assert run.region_of("test_it[4]")["extra"] == {
        "twice": 8,
        "verdict": "ok",
        "of": ["test_it[4]"],
    }
    assert run.region_of("test_it[5]")["extra"]["verdict"] == "BREACH"
    assert "extra" not in run.region_of("test_plain")


def test_fields_of_several_plugins_are_merged(with_hooks):
    """A conftest and a plugin can both add fields to the same region."""
    plugin = """
class Other:
    def pytest_cka_memory_region(self, result): return {"other": None}

def pytest_configure(config): config.pluginmanager.register(Other(), "other")
"""
    run = with_hooks(FIELDS + plugin, "def test_it(cka_memory): pass")
    assert set(run.region["extra"]) == {"twice", "verdict", "of", "other"}


INVALID_FIELDS = {
    "no_dict": ("5", "returned 5; return a dict of fields, or None"),
    "object": (
        "{'x': object}",
        "returned 'x': <class 'object'>; fields are texts, finite numbers",
    ),
    "infinite": ("{'x': float('inf')}", "returned 'x': inf; fields are"),
    "inner_key": ("{'x': {1: 2}}", "returned 'x': {1: 2}; fields are"),
    "key": ("{1: 2}", "returned 1: 2; fields are"),
    "deep": (f"{{'x': {'[' * 21 + ']' * 21}}}", "returned 'x': [[[[["),
    "raises": ("1 / 0", "raised ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize(("name", "message"), [(n, m) for n, (_, m) in INVALID_FIELDS.items()])
def test_field_that_cannot_be_reported_fails_its_test(
    with_hooks, finished_sessions, name, message, worker
):
    """If a field cannot be reported, a line names the hook, and
    the figures are there without it.
    """
    key = ("fields", *worker)
    if key not in finished_sessions:
        returned = (
            f"    'test_{n}': lambda: {value},\n" for n, (value, _) in INVALID_FIELDS.items()
        )
        hooks = f"""
RETURNED = {{
{"".join(returned)}
}}

def pytest_cka_memory_region(item): return RETURNED[item.name]()
"""
        source = (f"def test_{n}(cka_memory, meter): meter.allocate(3)\n" for n in INVALID_FIELDS)
        finished_sessions[key] = with_hooks(hooks, "".join(source), *worker)
    run = finished_sessions[key]
    run.assert_outcomes(failed=len(INVALID_FIELDS))
    assert f"conftest.py: pytest_cka_memory_region {message}" in run.text
    region = run.region_of(f"test_{name}")
    assert region["retained_bytes"] == 3
    assert "extra" not in region


def test_field_of_two_plugins_fails_the_test(with_hooks):
    """If two plugins return one field, the test fails, because one value would be lost."""
    plugin = """
class Other:
    def pytest_cka_memory_region(self, result): return {"twice": 1}

def pytest_configure(config): config.pluginmanager.register(Other(), "other")
"""
    run = with_hooks(FIELDS + plugin, "def test_it(cka_memory): pass")
    run.assert_outcomes(failed=1)
    assert "returned 'twice', which another plugin has returned too" in run.text


def test_failure_of_the_test_itself_is_shown_first(with_hooks):
    """An invalid result of a hook hides neither an exception nor a breach."""
    source = """
        import pytest

        def test_raises(cka_memory): raise ValueError("its own")

        @pytest.mark.zero_retention
        def test_breaks(meter): meter.allocate(1)
        """
    run = with_hooks("\ndef pytest_cka_memory_region(item): return 5\n", source)
    run.assert_outcomes(failed=2)
    assert "ValueError: its own" in run.text
    breach, hook_error = (
        run.text.index("zero_retention broken"),
        run.text.index("returned 5; return"),
    )
    assert breach < hook_error


def test_plugin_may_provide_a_device(session, pytester, worker):
    """A plugin's hook may return a meter for a device name, which the reports show."""
    pytester.makeconftest(
        """
        from pytest_cka_memory.testing import ScriptedMeter

        class Toaster(ScriptedMeter):
            device_name = "toaster"

        def pytest_cka_memory_meter(config, device):
            return Toaster() if device == "privateuseone" else None
        """
    )
    run = session("def test_it(cka_memory): pass", "--cka-memory-device=privateuseone", *worker)
    run.assert_outcomes(passed=1)
    assert run.report["session"]["device_name"] == "toaster"
