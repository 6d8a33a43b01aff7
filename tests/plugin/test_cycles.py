"""``no_cycles`` and ``max_cycles_mb``: what only the garbage collector frees, to the byte."""

import pytest

PROGRAMS = """
import gc
import weakref
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.no_cycles
DATA = TensorDataset(torch.ones(16, 250))


class Node:
    pass


class Caching:
    def __init__(self, device):
        self.cache = lambda: self
        self.weight = torch.ones(1000, device=device)


class Hooked(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(500, device=device))
        self.on_step = self.step

    def step(self):
        pass


@pytest.fixture
def device(cka_memory):
    return cka_memory.device


def test_closure(device):
    for _ in range(3):
        Caching(device)


def test_bound_method(device):
    Hooked(device)


def test_exception(device):
    def attempt():
        activations = torch.ones(2000, device=device)
        try:
            raise ValueError(len(activations))
        except ValueError as error:
            last = error

    attempt()


def test_children(device):
    parent, child = Node(), Node()
    parent.children, child.parent = [child], parent
    child.loss = torch.ones(100, device=device, requires_grad=True).exp().sum()


def test_batches_of_workers(device, cka_memory):
    with cka_memory.measure("loop") as region:
        for (batch,) in region.batches(DataLoader(DATA, batch_size=4, num_workers=2)):
            node = Node()
            node.me, node.batch = node, batch.to(device) + 1
        del node, batch


class Items(torch.utils.data.Dataset):
    def __init__(self, device):
        self.device = device

    def __len__(self):
        return 8

    def __getitem__(self, index):
        node = Node()
        node.me, node.tensor = node, torch.ones(250, device=self.device)
        return node.tensor.sum()


def test_data_set(device, cka_memory):
    with cka_memory.measure("loop") as region:
        for _ in region.batches(DataLoader(Items(device), batch_size=1)):
            pass
        del _


def test_data_set_in_workers(device, cka_memory):
    torch.ones(1, device=device)
    with cka_memory.measure("loop") as region:
        for batch in region.batches(DataLoader(Items("cpu"), batch_size=1, num_workers=2)):
            batch.to(device) + 1


def test_weak_parent(device):
    parent, child = Node(), Node()
    parent.children, child.parent = [child], weakref.ref(parent)
    child.loss = torch.ones(100, device=device, requires_grad=True).exp().sum()


def test_cycle_without_a_tensor(device):
    node = Node()
    node.me = node
    torch.ones(100, device=device)


def test_cycle_that_is_broken(device):
    model = Caching(device)
    model.cache = None


def test_older_cycle(cka_memory, device):
    model = Caching(device)
    del model
    with cka_memory.measure("later"):
        torch.ones(100, device=device)
        gc.collect()


def test_clean_batches_of_workers(device, cka_memory):
    model = torch.nn.Linear(250, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    with cka_memory.measure("loop") as region:
        for (batch,) in region.batches(DataLoader(DATA, batch_size=4, num_workers=2)):
            optimizer.zero_grad()
            model(batch.to(device)).mean().backward()
            optimizer.step()
"""
PLANTED = {
    "test_closure": (
        12_000,
        "held by Caching.weight, in the cycle Caching.cache (<lambda> at test_it.py:17) -> closure "
        "variable self -> Caching",
    ),
    "test_bound_method": (
        2_000,
        "held by Hooked.weight, in the cycle Hooked.on_step.__self__ -> Hooked",
    ),
    "test_exception": (
        8_000,
        "local variable activations of attempt, in the cycle ValueError.__traceback__ -> local "
        "variable last of attempt -> ValueError",
    ),
    "test_children": (804, "in the cycle Node.parent -> Node.children[0] -> Node"),
    "test_batches_of_workers": (16_000, "Node.batch, in the cycle Node.me -> Node"),
    "test_data_set": (8_000, "Node.tensor, in the cycle Node.me -> Node"),
}
"""Test -> the bytes that only the garbage collector frees, and what the message says."""
CLEAN = (
    "test_weak_parent",
    "test_cycle_without_a_tensor",
    "test_cycle_that_is_broken",
    "test_older_cycle",
    "test_clean_batches_of_workers",
    "test_data_set_in_workers",
)
DEVICES = [
    pytest.param(("cpu", "1"), id="native", marks=pytest.mark.native),
    pytest.param(("cpu", "0"), id="ledger"),
    pytest.param(("emulate:cuda", "1"), id="emulated", marks=pytest.mark.emulates),
]


@pytest.fixture(params=DEVICES)
def run(request, session, finished_sessions, monkeypatch):
    """Return the finished session of all programs, on one device."""
    device, native = request.param
    if request.param not in finished_sessions:
        monkeypatch.setenv("CKA_MEMORY_NATIVE", native)
        monkeypatch.setenv("COLUMNS", "200")
        options = f"--cka-memory-device={device}", "-p", "no:randomly"
        finished_sessions[request.param] = session(PROGRAMS, *options, forked=True)
    return finished_sessions[request.param]


@pytest.mark.parametrize("name", PLANTED)
def test_memory_in_a_cycle_breaks_the_limit_and_the_message_has_the_cycle(run, name):
    """What a cycle keeps alive breaks ``no_cycles`` to the byte, and the cycle is named as code."""
    cycle_bytes, cycle = PLANTED[name]
    region = run.region_of(name)
    assert (region["verdict"], region["cycle_bytes"]) == ("BREACH", cycle_bytes)
    assert region["retained_bytes"] == 0
    assert sum(found["bytes"] for found in region["cycles"]) == cycle_bytes
    text = " ".join(run.text.partition(f" {name} _")[2].partition("\n___")[0].split())
    assert "no_cycles broken: memory in reference cycles" in text
    assert cycle in text
    assert "it stays allocated until the garbage collector runs" in text
    assert "what to do: " in text
    assert region["cycles"][0]["created_at"][0].startswith("test_it.py:")


@pytest.mark.parametrize("name", CLEAN)
def test_code_that_leaves_the_collector_no_tensor_keeps_the_limit(run, name):
    """Clean code keeps ``no_cycles``: cycles without tensors, or older than the region, too."""
    region = run.region_of(name)
    assert (region["verdict"], region["cycle_bytes"], region["cycles"]) == ("ok", 0, [])


@pytest.mark.parametrize(
    ("marker", "kept"),
    [("max_cycles_mb('4000 B')", True), ("max_cycles_mb('3999 B')", False)],
    ids=["equal", "one-byte-above"],
)
def test_memory_in_cycles_at_the_limit_keeps_it(session, marker, kept):
    """A test whose cycles keep exactly its limit passes, and one more byte fails it."""
    run = session(
        f"""
        import gc
        import pytest
        import torch

        @pytest.mark.{marker}
        def test_it():
            cycle = [torch.ones(1000)]
            cycle.append(cycle)
        """,
        "--cka-memory-device=cpu",
        forked=True,
    )
    run.assert_outcomes(passed=int(kept), failed=int(not kept))
    assert run.region["cycle_bytes"] == 4000


def test_figure_is_measured_if_an_option_or_a_limit_asks_for_it(session):
    """``cycle_bytes`` is null unless a limit or ``--cka-memory-also=cycles`` asks for it."""
    source = """
    import pytest
    import torch

    @pytest.mark.zero_retention
    def test_it():
        cycle = [torch.ones(1000)]
        cycle.append(cycle)
    """
    silent = session(source, "--cka-memory-device=cpu", forked=True)
    asked = session(source, "--cka-memory-device=cpu", "--cka-memory-also=cycles", forked=True)
    assert [run.region["cycle_bytes"] for run in (silent, asked)] == [None, 4000]
    assert [run.region["verdict"] for run in (silent, asked)] == ["ok", "ok"]


def test_unknown_addition_is_a_usage_error(session):
    """``--cka-memory-also`` refuses a name that it does not know, and lists those that exist."""
    run = session("def test_it(): pass", "--cka-memory-also=cycles,circles")
    run.assert_refused("--cka-memory-also: cannot measure 'circles'", "cycles")
