"""A limit on an accelerator that the test never touched fails: a ``.to(device)`` was forgotten."""

import pytest

from pytest_cka_memory.core.figures import FIGURES
from pytest_cka_memory.core.markers import MARKERS

CUDA = """

METER.device = "cuda:0"
"""
SOURCE = """
import pytest

pytestmark = pytest.mark.zero_retention

def free(meter):
    meter.free(meter.allocate(8))

def test_forgotten(meter): pass

@pytest.mark.max_peak_mb(1)
def test_forgotten_in_two_regions(cka_memory):
    with cka_memory.measure("one"): pass
    with cka_memory.measure("two"): pass

def test_used(meter): free(meter)

def test_used_in_one_region_of_two(cka_memory, meter):
    with cka_memory.measure("no allocation"): pass
    with cka_memory.measure("used"): free(meter)

@pytest.fixture
def model(meter):
    block = meter.allocate(100)
    yield
    meter.free(block)

def test_uses_only_what_a_fixture_allocated(model): pass

@pytest.mark.allow_no_allocations
def test_permitted(meter): pass

def test_fails_for_its_own_reason(meter): assert 0

@pytest.mark.skip
def test_skipped(meter): pass
"""
MESSAGE = (
    "cannot be judged because nothing was allocated on cuda:0 during the test (a forgotten "
    ".to(device)?): create models and data on cka_memory.device, or, if the test is not "
    "meant to use this device, add @pytest.mark.allow_no_allocations"
)
UNMARKED = """
def test_on_the_cpu(): pass
def test_used(meter): meter.free(meter.allocate(8))
"""


@pytest.fixture
def on_cuda(scripted, extend_conftest):
    """Run sessions whose scripted meter is that of an accelerator."""
    extend_conftest(CUDA)
    return scripted


def test_limit_of_a_marker_breaks_if_nothing_was_allocated(on_cuda):
    """A marker's limit breaks if the test allocated nothing on the device: once for each test."""
    run = on_cuda(SOURCE)
    run.assert_outcomes(passed=4, failed=3, skipped=1)
    broken = {
        region["nodeid"].partition("::")[2]: [breach["limit"] for breach in region["breaches"]]
        for region in run.regions
        if region["breaches"]
    }
    assert broken == {
        "test_forgotten": ["zero_retention"],
        "test_forgotten_in_two_regions": ["zero_retention, max_peak_mb(1)"],
    }
    (region,) = [r for r in run.regions if r["nodeid"].endswith("::test_forgotten")]
    assert region["breaches"][0]["message"] == MESSAGE
    assert region["breaches"][0]["measured_bytes"] is None
    assert " ".join(run.text.split()).count("nothing was allocated on cuda:0 during") == 2
    again = on_cuda(SOURCE, "--cka-memory-allow-no-allocations")
    again.assert_outcomes(passed=6, failed=1, skipped=1)
    assert "nothing was allocated" not in again.text


def test_limit_of_an_option_is_not_judged_if_nothing_was_allocated(on_cuda, pytester):
    """Tests not meant for the device do not break an option's limit; the report counts them."""
    run = on_cuda(UNMARKED, "--cka-memory-max-peak-mb=1")
    run.assert_outcomes(passed=2)
    verdicts = [(r["verdict"], [u["reason"] for u in r["unjudged"]]) for r in run.regions]
    assert verdicts == [("not judged", ["nothing was allocated on cuda:0"]), ("ok", [])]
    line = "not judged: --cka-memory-max-peak-mb=1, nothing was allocated on cuda:0 (regions: 1)"
    assert line in run.text
    pytester.makeini("[pytest]\ncka_memory_allow_no_allocations = true\n")
    allowed = on_cuda(UNMARKED, "--cka-memory-max-peak-mb=1")
    assert [region["verdict"] for region in allowed.regions] == ["ok", "ok"]


def test_limit_on_the_cpu_holds_without_allocations(scripted):
    """The CPU is always used, so a limit holds there without any allocation."""
    run = scripted("import pytest\n@pytest.mark.zero_retention\ndef test_it(meter): pass\n")
    run.assert_outcomes(passed=1)
    assert run.region["verdict"] == "ok"


NOT_OF_THE_CARD = {"max_process_mb(4096)", "flat_process_per_batch(tolerance_mb=4096)"}
OF_THE_CARD = {
    "max_retained_mb(1)",
    "zero_retention",
    "max_peak_mb(512)",
    "max_level_mb(1024)",
    "max_reserved_mb(1024)",
    "flat_per_batch",
    "no_cycles",
    "max_cycles_mb(1)",
    "max_outside_mb(64)",
    "max_pools_mb(512)",
    "fits('t4', 'a10')",
    "memory_baseline(relative_to='used')",
}
OF_EACH_MARKER = """
import pytest

def loop(cka_memory):
    with cka_memory.measure("loop") as region:
        for _ in region.batches(range(20)):
            pass
"""
OF_A_MARKER = """
@pytest.mark.{marker}
@pytest.mark.parametrize("how", ["used", "forgotten"])
def test_{number}(cka_memory, meter, how):
    if how == "used":
        meter.free(meter.allocate(8))
    loop(cka_memory)
"""


@pytest.mark.slow
def test_only_limits_on_the_card_are_refused_on_an_untouched_card(on_cuda):
    """Markers about memory of the card are refused; the others, which this lists, are judged."""
    pytest.importorskip("psutil")
    markers = sorted(OF_THE_CARD | NOT_OF_THE_CARD)
    assert {marker.partition("(")[0] for marker in markers} == set(MARKERS) - {"peak_law"}
    source = OF_EACH_MARKER + "".join(
        OF_A_MARKER.format(marker=marker, number=number) for number, marker in enumerate(markers)
    )
    run = on_cuda(source)
    for number, marker in enumerate(markers):
        used, forgotten = (run.region_of(f"test_{number}[{how}]") for how in ("used", "forgotten"))
        assert not used["breaches"], marker
        refused = MESSAGE in [breach["message"] for breach in forgotten["breaches"]]
        if used["unjudged"] and not refused:  # the scripted device lacks what the marker judges
            assert forgotten["unjudged"] == used["unjudged"], marker
        else:
            assert refused == (marker in OF_THE_CARD), marker


LIMITS_OF_A_PLUGIN = """
from dataclasses import dataclass, replace
from pytest_cka_memory.limits import Breach, Limit, Maximum, max_peak_mb


@dataclass(frozen=True)
class OnHost(Limit):
    judges_device = False

    def judge(self, record):
        return Breach(self.text, 0, 1, "too much", "host_retained_bytes")


@dataclass(frozen=True)
class OfProcess(OnHost):
    addition = "process"
    judges_device = Limit.judges_device


@dataclass(frozen=True)
class OfUnknown(OnHost):
    judges_device = Limit.judges_device

    def judge(self, record):
        return None


def pytest_cka_memory_limits(item):
    return [
        OnHost("on_host"),
        OfProcess("of_process"),
        OfUnknown("of_unknown"),
        Maximum("batches", "batches", 5),
        max_peak_mb(1),
    ]
"""


def test_limit_of_a_plugin_says_whether_it_judges_the_card(on_cuda, extend_conftest):
    """A plugin's limit on the host or process is judged; one that may be on the card is not."""
    pytest.importorskip("psutil")
    extend_conftest(LIMITS_OF_A_PLUGIN)
    run = on_cuda("def test_it(cka_memory): pass\n")
    assert [breach["limit"] for breach in run.region["breaches"]] == ["on_host", "of_process"]
    assert [unjudged["limit"] for unjudged in run.region["unjudged"]] == [
        "of_unknown",
        "max_peak_mb(1)",
    ]


def test_figures_that_are_not_of_the_device_are_marked():
    """Only figures of the process, of the host and of the loop are not about the device."""
    others = {name for name, figure in FIGURES.items() if not figure.of_device}
    assert others == {
        "batches",
        "host_retained_bytes",
        *(name for name in FIGURES if name.startswith("process_")),
    }
