"""When the readings are taken: which memory is counted for a test and which is not."""

MASKING = """
import gc
import pytest

class Held:
    "Stands for a tensor: live in the meter as long as it is referenced."

    def __init__(self, meter, size):
        self.meter, self.handle = meter, meter.allocate(size)

    def __del__(self):
        self.meter.free(self.handle)

@pytest.fixture(autouse=True)
def naive(meter, request):
    gc.collect()
    before = meter.read().allocated_bytes
    yield
    gc.collect()
    change = meter.read().allocated_bytes - before
    print(f"fixture says {change} for {request.node.name}")

def test_fails_and_holds(meter):
    kept_by_the_traceback = Held(meter, 700)
    raise ValueError

LEAK = []

@pytest.mark.zero_retention
def test_leaks(meter):
    LEAK.append(Held(meter, 300))
"""
NAIVE_CALL_WRAPPER = """
import gc

class CollectingMeter(ScriptedMeter):
    def clean(self):  # as every real meter does
        gc.collect()
        return super().clean()

METER = CollectingMeter()

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    gc.collect()
    before = METER.read().allocated_bytes
    try:
        return (yield)
    finally:
        gc.collect()
        change = METER.read().allocated_bytes - before
        print(f"call wrapper says {change} for {item.name}")
"""


def test_traceback_of_an_earlier_failure_does_not_hide_a_leak(
    scripted, extend_conftest, monkeypatch
):
    """What sys.last_traceback referenced is freed when the next call begins.

    A fixture or a wrapper around pytest_runtest_call reads before pytest drops the last
    traceback, and so sees a leak of 300 bytes as 400 bytes freed. The plugin reads after that.
    """
    extend_conftest(NAIVE_CALL_WRAPPER)
    # Other plugins, and pytester in this process, may reference the traceback for longer.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    run = scripted(MASKING, "-s", "-p", "cka_memory", forked=True)
    run.assert_outcomes(failed=2)
    assert "fixture says -400 for test_leaks" in run.text
    assert "call wrapper says -400 for test_leaks" in run.text
    leak = run.region_of("test_leaks")
    assert (leak["retained_bytes"], leak["net_bytes"]) == (300, 300)
    assert leak["start_bytes"] == 0
    assert leak["verdict"] == "BREACH"


def test_leak_after_a_failure_is_exact_with_real_tensors(session):
    """A leak after a failed test has the exact figures of a session without that test."""
    run = session(
        """
        import pytest
        import torch

        LEAK = []

        def test_fails_and_holds():
            kept_by_the_traceback = torch.ones(1000)
            raise ValueError

        @pytest.mark.zero_retention
        def test_leaks():
            LEAK.append(torch.ones(100))

        @pytest.mark.zero_retention
        def test_clean():
            torch.ones(10).sum()
        """,
        "--cka-memory-device=cpu",
        forked=True,
    )
    run.assert_outcomes(passed=1, failed=2)
    assert run.region_of("test_leaks")["retained_bytes"] == 400
    assert run.region_of("test_leaks")["net_bytes"] == 400
    assert run.region_of("test_clean")["retained_bytes"] == 0


def test_memory_of_fixtures_is_not_counted(scripted):
    """What fixtures of any scope allocated is in both readings and does not count."""
    run = scripted(
        """
        import pytest

        pytestmark = pytest.mark.zero_retention

        @pytest.fixture
        def mine(meter):
            handle = meter.allocate(10)
            yield
            meter.free(handle)

        @pytest.fixture(scope="module")
        def shared():
            from conftest import METER
            METER.allocate(100)

        @pytest.fixture(scope="session")
        def cache():
            from conftest import METER
            METER.allocate(1000)

        def setup_function(function):
            from conftest import METER
            METER.allocate(10000)

        def test_first(mine, shared, cache, meter): meter.free(meter.allocate(1))
        def test_second(mine, shared, cache): pass
        """
    )
    run.assert_outcomes(passed=2)
    assert [r["start_bytes"] for r in run.regions] == [11110, 21110]
    assert [r["peak_increase_bytes"] for r in run.regions] == [1, 0]


def test_fixture_requested_inside_the_call_is_counted(scripted):
    """A shared value that a fixture creates inside the test is retained by the test."""
    run = scripted(
        """
        import pytest

        @pytest.fixture(scope="module")
        def shared():
            from conftest import METER
            METER.allocate(100)

        @pytest.mark.zero_retention
        def test_it(request): request.getfixturevalue("shared")
        """
    )
    run.assert_outcomes(failed=1)
    assert run.region["retained_bytes"] == 100


def test_local_variables_are_freed_before_the_test_is_judged(session):
    """Locals of a test, including cycles, are not retained; gradients of an older model are."""
    run = session(
        """
        import pytest
        import torch

        pytestmark = pytest.mark.zero_retention

        def test_locals():
            x = torch.ones(1000)
            y = torch.ones(1000, requires_grad=True)
            (x * y).sum().backward()

        def test_cycle():
            node = {"x": torch.ones(1000)}
            node["self"] = node

        @pytest.mark.parametrize("x", [torch.ones(10)])
        def test_parameter(x):
            x.add_(1)

        def test_grows_in_place(model=torch.nn.Linear(4, 4)):
            model(torch.ones(2, 4)).sum().backward()
        """,
        "--cka-memory-device=cpu",
    )
    run.assert_outcomes(passed=3, failed=1)
    assert run.region_of("test_locals")["retained_bytes"] == 0
    assert run.region_of("test_cycle")["retained_bytes"] == 0
    assert run.region_of("test_grows_in_place")["retained_bytes"] == (16 + 4) * 4


def test_freeing_old_tensors_does_not_hide_a_leak(session):
    """Retained bytes count new allocations, although the net change is negative."""
    run = session(
        """
        import pytest
        import torch

        OLD, NEW = [torch.ones(1000)], []

        @pytest.mark.zero_retention
        def test_swaps():
            OLD.clear()
            NEW.append(torch.ones(10))
        """,
        "--cka-memory-device=cpu",
    )
    run.assert_outcomes(failed=1)
    assert (run.region["retained_bytes"], run.region["net_bytes"]) == (40, -3960)


def test_leak_of_four_bytes_per_batch_with_real_tensors(session):
    """Keeping the loss tensor instead of its value grows by 4 bytes per batch."""
    run = session(
        """
        import pytest
        import torch
        from torch.utils.data import DataLoader

        @pytest.mark.flat_per_batch
        @pytest.mark.parametrize("keep", [lambda x: x, lambda x: x.item()], ids=["leak", "clean"])
        def test_epoch(cka_memory, keep):
            loader, losses = DataLoader(torch.ones(24, 8), batch_size=4), []
            with cka_memory.measure() as region, torch.no_grad():
                for x in region.batches(loader):
                    losses.append(keep(x.sum()))
        """,
        "--cka-memory-device=cpu",
    )
    run.assert_outcomes(passed=1, failed=1)
    assert run.region_of("test_epoch[leak]")["growth_bytes_per_batch"] == 4.0
    assert run.region_of("test_epoch[clean]")["growth_bytes_per_batch"] == 0.0
    assert run.region_of("test_epoch[clean]")["batches"] == 6


def test_one_byte_above_the_limit_fails_with_real_tensors(session):
    """With real tensors 1 MB keeps max_retained_mb(1), and one byte more breaks it."""
    run = session(
        """
        import pytest
        import torch

        KEPT = []

        @pytest.mark.max_retained_mb(1)
        @pytest.mark.parametrize("more", [0, 1])
        def test_keeps(more): KEPT.append(torch.ones(2**20 + more, dtype=torch.uint8))
        """,
        "--cka-memory-device=cpu",
    )
    run.assert_outcomes(passed=1, failed=1)
    assert [r["retained_bytes"] for r in run.regions] == [2**20, 2**20 + 1]
    run.result.stdout.fnmatch_lines(["max_retained_mb(1) broken: retained 1,048,577 bytes *"])
    assert "allowed 1,048,576 bytes (1.00 MB): 1 byte too much" in " ".join(run.text.split())


HASTY = """
from pytest_cka_memory.meters.base import Cleaned

class HastyMeter(ScriptedMeter):
    def clean_after(self, mark, *, thorough):
        return Cleaned(self.clean(), garbage_left=not thorough)

METER = HastyMeter()
"""


def test_only_whole_tests_without_limits_may_be_reported_with_garbage(scripted, extend_conftest):
    """Whole tests without limits may be reported with garbage and a mark; others are exact."""
    extend_conftest(HASTY)
    run = scripted(
        """
        import pytest

        def test_reported(meter):
            meter.allocate(3 * 2**20)

        @pytest.mark.max_retained_mb(5)
        def test_limited(meter):
            meter.allocate(3 * 2**20)

        def test_region(meter, cka_memory):
            with cka_memory.measure("block") as region:
                meter.allocate(3 * 2**20)
            assert not region.garbage_left
        """,
        "--cka-memory-report",
    )
    run.assert_outcomes(passed=3)
    left = [run.region_of(f"test_{name}")["garbage_left"] for name in ("reported", "limited")]
    assert left == [True, False]
    assert [line.split()[0] for line in run.text.splitlines() if "≤ 3.00" in line] == [
        "test_reported"
    ]
    assert "≤ marks tests without limits" in run.text


def test_mark_of_garbage_is_explained_only_if_a_figure_has_it(scripted, extend_conftest):
    """The mark ≤ of figures with garbage is explained only if a figure in the table has it."""
    extend_conftest(HASTY)
    run = scripted("def test_it(meter): meter.free(meter.allocate(1))", "--cka-memory-report")
    assert run.region["garbage_left"] is True
    assert "≤" not in run.text
