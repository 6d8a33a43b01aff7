"""Searching only the young objects finds the same objects as searching all of them."""

import gc
import os
import threading

import forked_processes
import pytest

from pytest_cka_memory.meters import collector
from pytest_cka_memory.meters.collector import PROMOTED_TOGETHER, Generations


class Thing:
    """The type of the objects to find."""


class Maker:
    """An object whose finalizer makes a `Thing`."""

    made: list[Thing] = []  # noqa: RUF012 - the leak

    def __del__(self):
        self.made.append(Thing())


@pytest.fixture
def things():
    """A `Generations` that has found no `Thing` yet."""
    gc.collect()
    found = Generations(lambda: {Thing})
    assert list(found.all()) == []
    yield found
    gc.collect()  # a finalizer makes an object
    Maker.made.clear()
    gc.collect()


def in_cycle(item):
    item.me = item
    return item


def test_absence_is_proved_without_a_full_collection(things):
    """That an object is gone is proved by searching young objects, without a full collection."""
    full = gc.get_stats()[2]["collections"]
    assert things.none_after_collecting() == PROMOTED_TOGETHER
    assert list(things.all()) == []
    assert things.none_after_collecting() == PROMOTED_TOGETHER
    assert gc.get_stats()[2]["collections"] == full


@pytest.mark.parametrize("collected", [None, 0, 1, 2])
def test_live_object_is_reported(things, collected):
    """A live object is reported in whichever generation it is."""
    kept = Thing()
    if collected is not None:
        gc.collect(collected)
    assert not things.none_after_collecting()
    assert list(things.all()) == [kept]


def test_object_in_a_young_cycle_needs_a_full_collection(things):
    """Old garbage may reference an object in a young cycle; only a full collection finds that."""
    in_cycle(Thing())
    assert not things.none_after_collecting()


def test_object_made_by_a_finalizer_is_found(things):
    """An object that a finalizer makes is found, because the search runs after it."""
    in_cycle(Maker())
    assert not things.none_after_collecting()
    # Nothing was collected where that would prove nothing.
    assert len(Maker.made) == PROMOTED_TOGETHER
    assert list(things.all()) == Maker.made


@pytest.mark.parametrize("makes", [False, True])
def test_old_objects_are_searched_if_another_thread_runs(things, monkeypatch, makes):
    """If another thread runs, its objects may have been promoted, so old ones are searched."""
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
        assert things.none_after_collecting() == (PROMOTED_TOGETHER and not makes)
        assert list(things.all()) == kept
    finally:
        monkeypatch.undo()
        end.set()
        thread.join()


def test_absence_is_not_proved_if_objects_are_promoted_one_by_one(things, monkeypatch):
    """Some versions of Python promote objects singly, so nothing is proved."""
    monkeypatch.setattr(collector, "PROMOTED_TOGETHER", False)
    assert not things.none_after_collecting()
    assert list(things.all()) == []


def test_objects_are_found_again_once_they_are_not_frozen(run_python):
    """``gc.unfreeze()`` makes objects old without a collection."""
    done = run_python("-c", FROZEN)
    assert done.stdout == "[] [] True\n", done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_search_leaves_the_collector_enabled_or_disabled(things, enabled):
    """A search leaves the garbage collector enabled or disabled, as it was."""
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    things.none_after_collecting()
    assert gc.isenabled() == enabled
    (gc.enable if was else gc.disable)()


FROZEN = """
import gc
from pytest_cka_memory.meters.collector import Generations

class Thing: pass

kept = Thing()
things = Generations(lambda: {Thing})
gc.freeze()
found = [list(things.all()) for _ in range(2)]
gc.unfreeze()
print(*found, list(things.all()) == [kept])
"""

STEPS = """
import gc, sys
from random import Random
from pytest_cka_memory.meters.collector import Generations

class Thing: pass

def everything():
    return {id(item) for item in gc.get_objects() if type(item) is Thing}

def leave_a_cycle():
    thing = Thing()
    thing.me = thing

def store_in_an_old_object():
    if kept: kept[0].held = Thing()

random, kept = Random(int(sys.argv[1])), []
things = Generations(lambda: {Thing})
assert list(things.all()) == []
steps = {
    "keep": lambda: kept.append(Thing()),
    "store in an old object": store_in_an_old_object,
    "drop": kept.clear,
    "leave a cycle": leave_a_cycle,
    "collect": lambda: gc.collect(random.randrange(3)),
    "freeze": gc.freeze,
    "unfreeze": gc.unfreeze,
    "allocate": lambda: [[] for _ in range(random.randrange(3000))] and None,
}
taken = []
for _ in range(5):
    for name in random.choices(list(steps), k=random.randrange(4)):
        taken.append(name)
        steps[name]()
    gc.disable()  # a found object must not be freed before it is compared
    try:
        assert {id(item) for item in things.all()} == everything(), taken
    finally:
        gc.enable()
    if things.none_after_collecting():
        gc.collect()
        assert everything() == set(), taken
print("same")
"""


@pytest.mark.parametrize("seed", range(6))
def test_search_finds_all_objects(run_python, seed):
    """A search finds each object that is made, dropped, collected or frozen between two.

    It runs in a process without torch, because each search goes through all objects.
    """
    done = run_python("-c", STEPS, str(seed))
    assert done.stdout == "same\n", done.stderr


REGIONS = """
import gc
import torch
from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters import collector

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

gc.get_freeze_count = lambda: 0  # what is frozen below contains no tensor
probe = MemoryProbe("cpu")
programs = clean, keep, in_cycle, in_old_garbage, grows_old, frozen, frees, nested, with_gradient
found, full = {}, {}
for cheap in (False, True):
    collector.PROMOTED_TOGETHER = cheap
    for program in programs:
        gc.collect()
        gc.freeze()  # the modules of torch, which each search would go through
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


@pytest.mark.slow
def test_regions_have_the_same_figures_with_the_faster_search():
    """Regions have the same figures with the faster search as without it."""
    environment = {**os.environ, "CKA_MEMORY_NATIVE": "0"}
    done = forked_processes.run(["python", "-c", REGIONS], environment=environment)
    assert done.stdout == "same\n", done.stderr
