"""Looking among young objects only finds what a look at all of them finds."""

import gc
import subprocess
import sys
import threading
from random import Random

import pytest

from pytest_cka_memory.meters.ledger import generations
from pytest_cka_memory.meters.ledger.generations import Generations


class Thing:
    """What is looked for."""


class Bearing:
    """Makes one when it dies."""

    born: list[Thing] = []  # noqa: RUF012 - the leak

    def __del__(self):
        self.born.append(Thing())


@pytest.fixture
def things():
    """Generations that have seen that there is none."""
    gc.collect()
    found = Generations(lambda: {Thing})
    assert list(found.all()) == []
    yield found
    Bearing.born.clear()
    gc.collect()


def everything():
    return {id(item) for item in gc.get_objects() if type(item) is Thing}


def in_cycle(item):
    item.me = item
    return item


@pytest.mark.parametrize("seed", range(6))
def test_a_look_finds_all(things, seed):
    """Whatever was made, dropped, collected or frozen since the last one."""
    random, kept = Random(seed), []
    steps = {
        "keep": lambda: kept.append(Thing()),
        "hide in an old object": lambda: setattr(kept[0], "held", Thing()) if kept else None,
        "drop": kept.clear,
        "leave a cycle": lambda: in_cycle(Thing()) and None,
        "collect": lambda: gc.collect(random.randrange(3)),
        "freeze": lambda: (gc.freeze(), gc.unfreeze()),
        "allocate": lambda: [[] for _ in range(random.randrange(3000))] and None,
    }
    for _ in range(25):
        for name in random.choices(list(steps), k=random.randrange(4)):
            steps[name]()
        gc.disable()  # or what is found may be gone before it is compared
        try:
            assert {id(item) for item in things.all()} == everything()
        finally:
            gc.enable()
        if things.none_after_collecting():
            gc.collect()
            assert everything() == set()


def test_none_is_proved_without_a_full_collection(things):
    """Which would cost more than all else of a region."""
    full = gc.get_stats()[2]["collections"]
    assert things.none_after_collecting()
    assert list(things.all()) == []
    assert things.none_after_collecting()
    assert gc.get_stats()[2]["collections"] == full


@pytest.mark.parametrize("collected", [None, 0, 1, 2])
def test_one_that_lives_is_no_none(things, collected):
    """Of any age."""
    kept = Thing()
    if collected is not None:
        gc.collect(collected)
    assert not things.none_after_collecting()
    assert list(things.all()) == [kept]


def test_one_in_a_young_cycle_is_left_to_a_full_collection(things):
    """It may be held by old garbage, which only that finds."""
    in_cycle(Thing())
    assert not things.none_after_collecting()


def test_one_that_a_young_finalizer_makes_is_seen(things):
    """The finalizer has run by then."""
    in_cycle(Bearing())
    assert not things.none_after_collecting()
    assert len(Bearing.born) == 1
    assert list(things.all()) == Bearing.born


@pytest.mark.parametrize("makes", [False, True])
def test_beside_another_thread_old_objects_are_looked_at(things, monkeypatch, makes):
    """Its objects may have grown old in the very collection that follows the look at the young."""
    kept = []
    collect = gc.collect

    def meanwhile(generation):
        if makes:
            kept.append(Thing())
        collect(generation)

    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        monkeypatch.setattr(gc, "collect", meanwhile)
        assert things.none_after_collecting() == (not makes)
        assert list(things.all()) == kept
    finally:
        monkeypatch.undo()
        end.set()
        thread.join()


def test_where_objects_grow_old_one_by_one_nothing_is_proved(things, monkeypatch):
    """As from Python 3.14 on, and without a GIL."""
    monkeypatch.setattr(generations, "LEAVE_AT_ONCE", False)
    assert not things.none_after_collecting()
    assert list(things.all()) == []


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(things, enabled):
    """Switched on or off."""
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    things.none_after_collecting()
    assert gc.isenabled() == enabled
    (gc.enable if was else gc.disable)()


REGIONS = """
import gc
import torch
from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.ledger import generations

class Node: pass

def clean(): torch.ones(10).sum()
def keep(): kept.append(torch.ones(10))
def in_cycle():
    node = Node()
    node.me, node.held = node, torch.ones(10)
def in_old_garbage():
    old[0].held = torch.ones(10)
    old.clear()
def grows_old():
    kept.append(torch.ones(10))
    gc.collect(1)
def frozen():
    kept.append(torch.ones(10))
    gc.freeze()
    gc.unfreeze()
def frees(): before.clear()
def nested():
    with probe.measure("inner"): keep()
def with_gradient():
    weight = torch.ones(5, requires_grad=True)
    weight.sum().backward()
    kept.append(weight)

probe = MemoryProbe("cpu")
programs = clean, keep, in_cycle, in_old_garbage, grows_old, frozen, frees, nested, with_gradient
found, full = {}, {}
for cheap in (False, True):
    generations.LEAVE_AT_ONCE = cheap
    for program in programs:
        kept, old, before = [], [Node()], []
        old[0].me = old[0]
        if program is frees: before.append(torch.ones(100))
        with probe.measure("warm"): pass
        collections = gc.get_stats()[2]["collections"]
        with probe.measure(program.__name__): program()
        full[program.__name__, cheap] = gc.get_stats()[2]["collections"] - collections
        found[program.__name__, cheap] = [
            {**record.to_dict(), "label": ""} for record in probe.records
        ]
        probe.records.clear()
for program in programs:
    assert found[program.__name__, True] == found[program.__name__, False], program
assert full["clean", False] >= 2, full
assert full["clean", True] == 0, full
print("same")
"""


def test_regions_read_the_same_to_the_byte():
    """In a process of its own, which holds no other tensor: with the proof and without."""
    done = subprocess.run([sys.executable, "-c", REGIONS], capture_output=True, text=True)
    assert done.stdout == "same\n", done.stderr
