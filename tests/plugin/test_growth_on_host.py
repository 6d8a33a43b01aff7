"""``flat_per_batch`` judges the accelerator; the report names what batches leave on the host."""

from types import CodeType

import pytest

pytestmark = pytest.mark.slow

LOOPS = """
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.flat_per_batch
DATA = TensorDataset(torch.ones(64, 8))


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n


def train(region, device, update, **options):
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for (batch,) in region.batches(DataLoader(DATA, batch_size=4, **options)):
        optimizer.zero_grad()
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        update(loss)
    return optimizer


def test_graph(cka_memory):
    meter = AverageMeter()
    with cka_memory.measure() as region:
        train(region, cka_memory.device, lambda loss: meter.update(loss, 4))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["own", "workers"])
def test_item(cka_memory, options):
    meter = AverageMeter()
    with cka_memory.measure() as region:
        optimizer = train(
            region, cka_memory.device, lambda loss: meter.update(loss.item(), 4), **options
        )


def test_pinned(cka_memory):
    kept = []
    with cka_memory.measure() as region:
        train(region, cka_memory.device, lambda loss: kept.append(torch.ones(25).pin_memory()))
"""


@pytest.fixture
def run(session, finished_sessions, monkeypatch):
    """Return the finished session of these loops on the emulated card."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if "host" not in finished_sessions:
        device = "--cka-memory-device=emulate:cuda:t4"
        finished_sessions["host"] = session(LOOPS, device, forked=True)
    return finished_sessions["host"]


@pytest.mark.emulates
def test_graph_on_the_host_is_named_in_the_report_of_a_test_that_passes(run):
    """In a test that passes, the graph that each batch leaves on
    the host is named: 8 bytes each.
    """
    run.assert_outcomes(passed=4)
    region = run.region_of("test_graph")
    assert (region["growth_bytes_per_batch"], region["verdict"]) == (0.0, "ok")
    (note,) = region["unjudged"]
    line = LOOPS[: LOOPS.index("self.sum +=")].count("\n")  # pytester strips the first one
    assert note["limit"] == "flat_per_batch on the host"
    has_columns = hasattr(CodeType, "co_positions")  # not in Python 3.10: then the whole line
    made = "AverageMeter.update: `value * n`" if has_columns else "update: `self.sum += value * n`"
    assert note["reason"].startswith(
        "16 tensors, 128 bytes, allocated in several batches, are retained and not judged: made at "
        f"test_it.py:{line} in {made}, held by meter.sum.grad_fn"
    )
    assert note["reason"].endswith("add loss.item() to the sum instead of the loss")
    assert "not judged: flat_per_batch on the host, 16 tensors" in " ".join(run.text.split())


@pytest.mark.emulates
@pytest.mark.parametrize("loader", ["own", "workers"])
def test_loop_that_keeps_numbers_has_no_note_and_no_search(run, loader):
    """An optimizer's counts, allocated in the first batch alone, cause no note and no search."""
    region = run.region_of(f"test_item[{loader}]")
    assert region["host_retained_bytes"] > 0
    assert (region["unjudged"], region["host_retained"]) == ([], [])


@pytest.mark.emulates
def test_pinned_memory_that_each_batch_keeps_is_named(run):
    """Pinned memory belongs to the host, and is named if each batch keeps some."""
    region = run.region_of("test_pinned")
    (note,) = region["unjudged"]
    assert note["reason"].startswith("16 tensors, 1,600 bytes, allocated in several batches")
    assert "held by kept[0]" in note["reason"]


@pytest.mark.native
def test_cpu_has_no_note_about_the_host(session):
    """On the CPU the limit itself judges the host's memory, so it breaks and there is no note."""
    run = session(LOOPS, "--cka-memory-device=cpu", "-k", "graph", forked=True)
    run.assert_outcomes(failed=1)
    region = run.region_of("test_graph")
    assert (region["host_retained_bytes"], region["unjudged"]) == (None, [])
    assert region["growth_bytes_per_batch"] > 0
