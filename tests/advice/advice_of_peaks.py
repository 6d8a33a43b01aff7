"""Hints on peaks, on garbage in reference cycles, and on the memory of processes."""

import gc
import os
import weakref

import pytest
import torch
from advice_table import CPU, KEEP, LINUX, NATIVE, advice, follows
from torch import nn
from torch.utils.data import DataLoader

MB = 2**20
SEE = (
    "pass --cka-memory-html=memory.html --cka-memory-timeline to see when each group of tensors "
    "was live"
)


def network_on(device):
    layers = [nn.Conv1d(4, 4, 1), nn.Sigmoid()] * 8
    return nn.Sequential(*layers).to(device)


@advice(
    "if no backward pass follows, compute it in torch.no_grad(); an autograd graph keeps it for a "
    "backward pass, but no backward pass has freed it",
    limit=pytest.mark.max_peak_mb(1.5),
    skip=NATIVE,
)
def evaluation(cka_memory):
    weight = nn.Parameter(torch.ones(1, device=cka_memory.device))
    inputs = torch.ones(2**16, device=cka_memory.device)
    with cka_memory.measure():
        for _ in range(8):
            inputs = (inputs * weight).sigmoid()


@follows(evaluation)
def evaluation_without_gradients(cka_memory):
    weight = nn.Parameter(torch.ones(1, device=cka_memory.device))
    inputs = torch.ones(2**16, device=cka_memory.device)
    with cka_memory.measure(), torch.no_grad():
        for _ in range(8):
            inputs = (inputs * weight).sigmoid()


@advice(SEE, limit=pytest.mark.max_peak_mb(1), is_command=True)
def training_step(cka_memory):
    weight = nn.Parameter(torch.ones(1, device=cka_memory.device))
    inputs = torch.ones(2**16, device=cka_memory.device)
    with cka_memory.measure():
        for _ in range(8):
            inputs = (inputs * weight).sigmoid()
        inputs.sum().backward()
        del inputs


@advice(
    f"{SEE}; the region allocates most of the peak",
    limit=pytest.mark.max_level_mb(1),
    is_command=True,
)
def level(cka_memory):
    with cka_memory.measure():
        torch.ones(64 * MB, dtype=torch.uint8, device=cka_memory.device)


@advice(
    "free what earlier code and fixtures left in use, or use smaller models and data; most "
    "of the peak was in use before the region",
    limit=pytest.mark.max_level_mb(100),
)
def earlier_memory(cka_memory):
    before = torch.ones(128 * MB, dtype=torch.uint8, device=cka_memory.device)
    with cka_memory.measure():
        torch.ones(MB, dtype=torch.uint8, device=cka_memory.device)
    del before


@follows(earlier_memory)
def earlier_memory_freed(cka_memory):
    before = torch.ones(128 * MB, dtype=torch.uint8, device=cka_memory.device)
    del before
    with cka_memory.measure():
        torch.ones(MB, dtype=torch.uint8, device=cka_memory.device)


@follows(earlier_memory)
def smaller_data(cka_memory):
    before = torch.ones(MB, dtype=torch.uint8, device=cka_memory.device)
    with cka_memory.measure():
        torch.ones(MB, dtype=torch.uint8, device=cka_memory.device)
    del before


class Node:
    """An object with any attributes."""


def failing(x):
    raise ValueError(x.shape)


@advice(
    "delete the variable that holds the exception, or clear its traceback with "
    "error.with_traceback(None); the traceback keeps frames alive, and one of them "
    "references the exception",
    limit=pytest.mark.no_cycles,
)
def exception_in_a_variable(cka_memory):
    with cka_memory.measure():
        attempt(cka_memory.device)


def attempt(device):
    x = torch.ones(250, device=device)
    try:
        failing(x)
    except ValueError as error:
        last = error
    return str(last)


@follows(exception_in_a_variable)
def exception_in_a_variable_deleted(cka_memory):
    with cka_memory.measure():
        attempt_and_delete(cka_memory.device)


def attempt_and_delete(device):
    x = torch.ones(250, device=device)
    try:
        failing(x)
    except ValueError as error:
        last = error
    text = str(last)
    del last
    return text


@follows(exception_in_a_variable)
def exception_without_a_traceback(cka_memory):
    with cka_memory.measure():
        attempt_without_a_traceback(cka_memory.device)


def attempt_without_a_traceback(device):
    x = torch.ones(250, device=device)
    try:
        failing(x)
    except ValueError as error:
        last = error
    last.with_traceback(None)
    return str(last)


class Step:
    """Has a method, and a tensor."""

    def __init__(self, device):
        self.x = torch.ones(250, device=device)

    def run(self):
        return self.x


@advice(
    "keep weakref.WeakMethod(self.method) instead of the bound method, or look the method "
    "up when it is called; the object references itself through its bound method",
    limit=pytest.mark.no_cycles,
)
def own_method(cka_memory):
    with cka_memory.measure():
        step = Step(cka_memory.device)
        step.method = step.run
        del step


@follows(own_method)
def own_weak_method(cka_memory):
    with cka_memory.measure():
        step = Step(cka_memory.device)
        step.method = weakref.WeakMethod(step.run)
        del step


@follows(own_method)
def method_looked_up(cka_memory):
    with cka_memory.measure():
        step = Step(cka_memory.device)
        step.run()
        del step


def set_callback(node):
    node.callback = lambda: node


def set_callback_with_an_argument(node):
    node.callback = lambda node: node


def set_weak_callback(node):
    weak = weakref.ref(node)
    node.callback = lambda: weak()


@advice(
    "pass the object to the function as an argument, or reference the object with weakref.ref; "
    "the closure of the function references the object, and the object references the function",
    limit=pytest.mark.no_cycles,
)
def closure(cka_memory):
    with cka_memory.measure():
        node = Node()
        node.x = torch.ones(250, device=cka_memory.device)
        set_callback(node)
        del node


@follows(closure)
def argument(cka_memory):
    with cka_memory.measure():
        node = Node()
        node.x = torch.ones(250, device=cka_memory.device)
        set_callback_with_an_argument(node)
        del node


@follows(closure)
def weak_closure(cka_memory):
    with cka_memory.measure():
        node = Node()
        node.x = torch.ones(250, device=cka_memory.device)
        set_weak_callback(node)
        del node


@advice(
    (
        "make one of these references weak with weakref.ref, or delete it when it is not "
        "needed any more"
    ),
    limit=pytest.mark.no_cycles,
)
def two_objects(cka_memory):
    with cka_memory.measure():
        parent, child = Node(), Node()
        parent.x = torch.ones(250, device=cka_memory.device)
        parent.child, child.parent = child, parent
        del parent, child


@follows(two_objects)
def two_objects_with_a_weak_reference(cka_memory):
    with cka_memory.measure():
        parent, child = Node(), Node()
        parent.x = torch.ones(250, device=cka_memory.device)
        parent.child, child.parent = child, weakref.ref(parent)
        del parent, child


@follows(two_objects)
def two_objects_of_which_one_is_let_go(cka_memory):
    with cka_memory.measure():
        parent, child = Node(), Node()
        parent.x = torch.ones(250, device=cka_memory.device)
        parent.child, child.parent = child, parent
        del child.parent
        del parent, child


@advice(
    "to see the cycle, call gc.disable() before the region; the collector, or a generator "
    "or finalizer in the cycle, freed it before it could be described",
    limit=pytest.mark.no_cycles,
    is_command=True,
)
def collected_cycle(cka_memory):
    with cka_memory.measure():
        node = Node()
        node.x, node.me = torch.ones(250, device=cka_memory.device), node
        del node
        gc.collect()


def in_a_cycle(device):
    node = Node()
    node.x, node.me = torch.ones(MB, dtype=torch.uint8, device=device), node


@advice(
    "to free it, call gc.collect() in the loop, or break the cycle of the objects made at "
    "advice_of_peaks.py:N",
    limit=pytest.mark.max_peak_mb(4),
    in_message=True,
    skip=NATIVE,
)
def garbage(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            in_a_cycle(cka_memory.device)


@follows(garbage)
def garbage_collected(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            in_a_cycle(cka_memory.device)
            gc.collect()


@follows(garbage)
def cycle_broken(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(8)):
            node = Node()
            node.x = torch.ones(MB, dtype=torch.uint8, device=cka_memory.device)
            node.me = weakref.ref(node)
            del node


@advice(
    "look for memory outside tensors: lists and dicts of Python objects, NumPy arrays, other "
    "libraries, threads. Python's tracemalloc lists the lines that allocate most of such memory",
    devices=(CPU,),
    limit=pytest.mark.max_process_mb(40),
    skip=LINUX or NATIVE,
    is_command=True,
)
def python_objects(cka_memory):
    with cka_memory.measure() as region:
        for _ in region.batches(range(4)):
            KEEP.append(os.urandom(20 * MB))


@advice(
    "limit the peak with max_peak_mb, which names the lines that allocate most; tensors "
    "used this memory and have been freed since",
    devices=(CPU,),
    limit=pytest.mark.max_process_mb(40),
    skip=LINUX or NATIVE,
    is_command=True,
)
def tensors_that_were_freed(cka_memory):
    with cka_memory.measure() as region:
        KEEP.append(torch.ones(80 * MB, dtype=torch.uint8))
        region.batch_done()
        KEEP.clear()


class Caching:
    """A data set that keeps every item, or the last ones."""

    def __init__(self, bound):
        self.bound, self.cache = bound, []

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.cache.append(os.urandom(MB // 2))
        del self.cache[: -self.bound]
        return index


class Names:
    """A data set of names, which counts their characters."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return 8_000

    def __getitem__(self, index):
        for other in range(index, len(self.names), 8_000):
            hold = self.names[other]
        return len(hold)


def read_by_workers(cka_memory, data, size):
    loader = DataLoader(data, size, num_workers=2, multiprocessing_context="fork")
    with cka_memory.measure() as region:
        for _ in region.batches(loader):
            pass


@advice(
    "the workers keep more memory with every item; look in the data set, its transforms and "
    "collate_fn for a list, dict or cache that grows with each item, and limit its length. With "
    "num_workers=0 the test measures the same code in this process, where the marker no_cycles "
    "finds reference cycles too",
    devices=(CPU,),
    limit=pytest.mark.flat_process_per_batch("256 KiB"),
    skip=LINUX or NATIVE,
)
def cache_in_workers(cka_memory):
    read_by_workers(cka_memory, Caching(10**6), 4)


@follows(cache_in_workers)
def bounded_cache_in_workers(cka_memory):
    read_by_workers(cka_memory, Caching(8), 4)


@advice(
    "keep the data set in an array or tensor instead of a list or dict of Python objects. "
    "The workers grow although they keep nothing, because reading a Python object changes "
    "its reference count, and this copies the memory page of the object",
    devices=(CPU,),
    limit=pytest.mark.flat_process_per_batch("256 KiB"),
    skip=LINUX or NATIVE,
)
def list_in_workers(cka_memory):
    read_by_workers(cka_memory, Names([f"{number:032d}" for number in range(160_000)]), 500)


@follows(list_in_workers)
def array_in_workers(cka_memory):
    import numpy as np

    names = np.array([f"{number:032d}" for number in range(160_000)], dtype="S32")
    read_by_workers(cka_memory, Names(names), 500)


@advice(
    "the autograd graph of `total` in sum_of_losses_after_backward (advice_of_peaks.py:N) keeps "
    "nodes of every batch; they take host memory that is not in tensors; add loss.item() to the "
    "sum instead of the loss",
    devices=(CPU,),
    limit=pytest.mark.flat_process_per_batch("64 KiB"),
    skip=LINUX or NATIVE,
)
def sum_of_losses_after_backward(cka_memory):
    weight, total = torch.ones(250, requires_grad=True), 0.0
    with cka_memory.measure() as region:
        for _ in region.batches(range(12)):
            for _ in range(800):
                loss = weight.exp().sum()
                loss.backward()
                total = total + loss


@follows(sum_of_losses_after_backward)
def sum_of_numbers_after_backward(cka_memory):
    weight, total = torch.ones(250, requires_grad=True), 0.0
    with cka_memory.measure() as region:
        for _ in region.batches(range(12)):
            for _ in range(800):
                loss = weight.exp().sum()
                loss.backward()
                total = total + loss.item()


STEPS = 200
"""Of a batch: their nodes take several times the limit, and are found in a second."""


@advice(
    "the autograd graph of `hidden` in state_of_nodes (advice_of_peaks.py:N) keeps nodes of every "
    "batch; they take host memory that is not in tensors; compute each new value from a detach() "
    "of the previous one, or in torch.no_grad()",
    devices=(CPU,),
    limit=pytest.mark.flat_process_per_batch("64 KiB"),
    skip=LINUX or NATIVE,
)
def state_of_nodes(cka_memory):
    weight, hidden = torch.ones(250, requires_grad=True), torch.ones(250)
    with cka_memory.measure() as region:
        for _ in region.batches(range(12)):
            for _ in range(STEPS):
                hidden = hidden + weight * 2 * 2 * 2 * 2 * 2


@follows(state_of_nodes)
def state_of_nodes_detached(cka_memory):
    weight, hidden = torch.ones(250, requires_grad=True), torch.ones(250)
    with cka_memory.measure() as region:
        for _ in region.batches(range(12)):
            for _ in range(STEPS):
                hidden = hidden.detach() + weight * 2 * 2 * 2 * 2 * 2


@follows(state_of_nodes)
def state_without_nodes(cka_memory):
    weight, hidden = torch.ones(250, requires_grad=True), torch.ones(250)
    with cka_memory.measure() as region:
        for _ in region.batches(range(12)):
            for _ in range(STEPS):
                with torch.no_grad():
                    hidden = hidden + weight * 2 * 2 * 2 * 2 * 2
