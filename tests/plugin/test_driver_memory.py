"""``max_outside_mb``: memory of the card outside torch's allocator, as the driver counts it."""

import pytest

pytestmark = pytest.mark.slow

PROGRAMS = """
import ctypes
from importlib.util import find_spec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

MB = 2**20
DATA = TensorDataset(torch.ones(16, 250))
pytestmark = pytest.mark.max_outside_mb(8)


class Library:
    '''Takes memory of the card without torch, as NCCL does.'''

    def __init__(self):
        self.blocks = []
        self.runtime = ctypes.CDLL(find_spec("emulated_cuda._cuda").origin)

    def take(self, mb):
        block = ctypes.c_void_p()
        assert self.runtime.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(mb * MB)) == 0
        self.blocks.append(block)

    def give_back(self):
        for block in self.blocks:
            assert self.runtime.cudaFree(block) == 0
        self.blocks.clear()


@pytest.fixture
def library():
    library = Library()
    yield library
    library.give_back()


def test_at_once(library, cka_memory):
    torch.ones(MB, device=cka_memory.device)
    library.take(16)


def test_at_each_batch(library, cka_memory):
    with cka_memory.measure() as region:
        for batch in region.batches(range(4)):
            library.take(4)
            torch.ones(MB, device=cka_memory.device)


def test_given_back_after_a_batch(library, cka_memory):
    with cka_memory.measure() as region:
        for batch in region.batches(range(4)):
            torch.ones(MB, device=cka_memory.device)
            library.give_back()
            if batch == 1:
                library.take(16)


def test_beside_tensors(library, cka_memory):
    with cka_memory.measure():
        kept = torch.ones(64 * MB, device=cka_memory.device)
        library.take(16)
        del kept


def test_with_workers(library, cka_memory):
    with cka_memory.measure() as region:
        for (batch,) in region.batches(DataLoader(DATA, batch_size=4, num_workers=2)):
            batch.to(cka_memory.device)
            library.take(4)


def test_tensors_alone(cka_memory):
    torch.ones(64 * MB, device=cka_memory.device)


def test_equal_to_the_limit(library, cka_memory):
    torch.ones(MB, device=cka_memory.device)
    library.take(8)


def test_taken_before(library, cka_memory):
    library.take(64)
    with cka_memory.measure():
        torch.ones(MB, device=cka_memory.device)


def test_empty_cache(cka_memory):
    with cka_memory.measure() as region:
        for batch in region.batches(range(6)):
            torch.ones((batch + 1) * 8 * MB, device=cka_memory.device)
            torch.cuda.empty_cache()


def test_clean_workers(cka_memory):
    model = torch.nn.Linear(250, 250).to(cka_memory.device)
    with cka_memory.measure() as region:
        for (batch,) in region.batches(DataLoader(DATA, batch_size=4, num_workers=2)):
            model(batch.to(cka_memory.device))


def test_wait_for_a_free_card(library, cka_memory):
    torch.ones(MB, device=cka_memory.device)
    free, total = torch.cuda.mem_get_info()
    assert cka_memory.wait_until_free(64) * MB >= free
    with pytest.raises(ValueError, match="can never be free"):
        cka_memory.wait_until_free(2 * total / MB)
    with pytest.raises(TimeoutError, match="torch's allocator in this process has"):
        cka_memory.wait_until_free(total / MB, timeout=0)
"""
PLANTED = {
    "test_at_once": 16,
    "test_at_each_batch": 16,
    "test_given_back_after_a_batch": 16,
    "test_beside_tensors": 16,
    "test_with_workers": 16,
}
"""Test -> the MB that rose outside torch's allocator."""
CLEAN = {
    "test_tensors_alone": 0,
    "test_equal_to_the_limit": 8,
    "test_taken_before": 0,
    "test_empty_cache": 0,
    "test_clean_workers": 0,
}


@pytest.fixture
def run(session, finished_sessions, monkeypatch):
    """Return the finished session of all programs on the emulated card."""
    if not finished_sessions:
        monkeypatch.setenv("COLUMNS", "200")
        options = "--cka-memory-device=emulate:cuda", "-p", "no:randomly", "--cka-memory-report"
        finished_sessions["run"] = session(PROGRAMS, *options, forked=True)
    return finished_sessions["run"]


@pytest.mark.emulates
@pytest.mark.parametrize("name", PLANTED)
def test_memory_that_a_library_takes_breaks_the_limit(run, name):
    """What rises outside torch's allocator breaks the limit, to the byte on the emulated card."""
    region = run.region_of(name)
    assert region["verdict"] == "BREACH"
    assert region["outside_increase_bytes"] == PLANTED[name] * 2**20
    text = " ".join(run.text.partition(f" {name} _")[2].partition("\n___")[0].split())
    assert "max_outside_mb(8) broken: rise outside torch's allocator 16,777,216 bytes" in text
    assert "at its highest, and torch's reserve rose by" in text
    assert "NCCL, other libraries or other processes" in text


@pytest.mark.emulates
@pytest.mark.parametrize("name", CLEAN)
def test_memory_of_torch_or_from_before_keeps_the_limit(run, name):
    """Tensors, the reserve, and what was taken before the region do not count."""
    region = run.region_of(name)
    assert (region["verdict"], region["outside_increase_bytes"]) == ("ok", CLEAN[name] * 2**20)
    assert region["driver_peak_bytes"] >= region["driver_start_bytes"] > 0


@pytest.mark.emulates
def test_waiting_for_a_free_card(run):
    """It returns if enough is free, and raises if that can never be or takes too long."""
    assert run.region_of("test_wait_for_a_free_card")["outcome"] == "passed"


@pytest.mark.emulates
def test_report_has_a_note_about_memory_outside_the_allocator(run):
    """The report names the region whose memory outside torch rose most, beyond the reserve's."""
    rises = [
        region["outside_increase_bytes"] > region["reserved_increase_bytes"]
        for region in run.regions
    ]
    assert 0 < sum(rises) < len(rises)
    counted = f"{sum(rises)} region{'s' * (sum(rises) > 1)}"
    text = " ".join(run.text.split())
    assert f"the card's memory rose by more than the reserve in {counted}, most in" in text
    assert any("outside torch's allocator" in note for note in run.report["session"]["notes"])


@pytest.mark.emulates
def test_driver_is_asked_only_if_a_limit_or_an_option_asks_for_it(session):
    """A region without ``max_outside_mb`` makes no call of the driver for its memory."""
    run = session(
        """
        import pytest
        import torch

        @pytest.mark.zero_retention
        def test_it(cka_memory, monkeypatch):
            torch.ones(1, device=cka_memory.device)
            monkeypatch.setattr(torch.cuda, "mem_get_info", None)
            monkeypatch.setattr(torch.accelerator, "get_memory_info", None, raising=False)
            with cka_memory.measure() as region:
                torch.ones(1, device=cka_memory.device)
                region.batch_done()
        """,
        "--cka-memory-device=emulate:cuda",
        forked=True,
    )
    run.assert_outcomes(passed=1)
    assert run.region["driver_start_bytes"] is None


def test_device_without_a_driver_is_not_judged(session):
    """On the CPU the limit is not judged, the report says why, and waiting returns at once."""
    run = session(
        """
        import pytest

        @pytest.mark.max_outside_mb(8)
        def test_it(cka_memory):
            assert cka_memory.wait_until_free("512 MiB") is None
        """,
        "--cka-memory-device=cpu",
    )
    run.assert_outcomes(passed=1)
    assert (run.region["verdict"], run.region["driver_start_bytes"]) == ("not judged", None)
    assert run.region["unjudged"][0]["reason"] == (
        "this device has no driver that counts its memory"
    )
