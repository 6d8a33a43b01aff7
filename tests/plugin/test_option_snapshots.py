"""``--cka-memory-snapshots``: one file per failed test, or the reason why there is none."""

import pytest

CONFTEST = """
import pytest
from pytest_cka_memory.testing import ScriptedMeter

class WithHistory(ScriptedMeter):
    recording = False

    def record_history(self):
        self.recording = True
        return True

    def dump_history(self, path):
        assert self.recording, "dump_history was called, but no history was recorded"
        path.write_bytes(b"history")
        return True

METER = {meter}()

def pytest_cka_memory_meter():
    return METER

@pytest.fixture
def meter():
    return METER
"""
TESTS = """
import pytest

@pytest.mark.zero_retention
def test_leaks(meter):
    meter.allocate(1)

@pytest.mark.zero_retention
@pytest.mark.parametrize("name", ["a/b", "a:b"])
def test_raises(name):
    raise MemoryError

@pytest.mark.zero_retention
def test_clean():
    pass
"""


@pytest.fixture
def run(pytester):
    """Run the tests above with a meter of the named class; return the result."""

    def run(meter, *options):
        pytester.makeconftest(CONFTEST.format(meter=meter))
        pytester.makepyfile(test_it=TESTS)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)

    return run


def test_each_failed_test_writes_one_file_and_names_it(run, pytester):
    """Each failed test writes a file of its own, even if names
    differ in replaced characters only.
    """
    result = run("WithHistory", "--cka-memory-snapshots=new/folder")
    result.assert_outcomes(passed=1, failed=3)
    files = sorted(path.name for path in (pytester.path / "new/folder").iterdir())
    assert len(files) == 3
    assert all(name.endswith(".pickle") for name in files)
    for name in files:
        result.stdout.fnmatch_lines(
            [
                f"*new/folder/{name}: open it in PyTorch's memory viewer, or",
                f"python -m pytest_cka_memory snapshot *new/folder/{name}",
                f"python -m pytest_cka_memory replay *new/folder/{name}",
            ]
        )


def test_failure_says_that_the_device_keeps_no_history(run, pytester):
    """The CPU keeps no history: the failure says so, and no empty snapshot is written."""
    result = run("ScriptedMeter", "--cka-memory-snapshots=folder")
    result.stdout.fnmatch_lines("no memory snapshot: cpu records no allocation history")
    assert list((pytester.path / "folder").iterdir()) == []


def test_no_history_is_recorded_without_the_option(run, pytester):
    """Recording history costs time at every allocation, so it needs the option."""
    run("WithHistory").assert_outcomes(passed=1, failed=3)
    assert not list(pytester.path.glob("**/*.pickle"))


def test_path_of_a_file_is_refused(run, pytester):
    """If the path of snapshots is a file, the session ends with a usage error before any test."""
    pytester.makefile(".txt", taken="")
    result = run("WithHistory", "--cka-memory-snapshots=taken.txt")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*--cka-memory-snapshots: *taken.txt is a file; write a folder's*")
