"""What the thread of a backward pass still references has been freed for every figure.

The thread gives the gradients to the caller and drops its own reference up to 1 ms later. Before
the meter waited for that, one in four of these readings was wrong.
"""

import threading
from contextlib import ExitStack, contextmanager

import pytest
import torch

MIB = 2**20
ELEMENTS = MIB // 4
REPEATS = 30


def weight_on(device):
    return torch.ones(ELEMENTS, device=device, requires_grad=True)


def level_of(probe):
    """Return the level without garbage."""
    with probe.measure() as region:
        pass
    return region.record.end_bytes


def run(weight):
    """Run a backward pass whose gradient nobody keeps."""
    torch.autograd.grad(weight.exp().sum(), weight)


def run_without_allocation(weight):
    """Run a backward pass in whose thread nothing is allocated: the caller made the gradient."""
    torch.autograd.grad(weight.sum(), weight)


def test_what_a_backward_thread_still_frees_is_no_garbage(probe, cuda):
    """No cycle holds the memory."""
    found = set()
    for _ in range(200):
        with probe.measure() as region:
            run(weight_on(cuda))
        found.add((region.garbage_end_bytes, region.retained_bytes))
    assert found == {(0, 0)}


def test_a_region_begins_without_it_also_at_a_level_at_which_there_was_no_garbage(probe, cuda):
    """A gradient makes the level the same as the tensor did that has been freed since."""
    weight, starts = weight_on(cuda), set()
    level = level_of(probe)
    for _ in range(REPEATS):
        as_large = torch.ones(ELEMENTS, device=cuda)
        with probe.measure():  # at this level, there is no garbage
            pass
        del as_large
        run(weight)
        with probe.measure() as region:
            pass
        starts.add(region.start_bytes)
    assert starts == {level}


def test_a_snapshot_does_not_have_it(probe, cuda):
    """Outside a region and inside one."""
    weight, levels = weight_on(cuda), set()
    level = level_of(probe)
    for _ in range(REPEATS):
        run(weight)
        levels.add(probe.snapshot().allocated_bytes)
        with probe.measure():
            run(weight)
            levels.add(probe.snapshot().allocated_bytes)
    assert levels == {level}


def test_a_region_ends_without_it_although_it_is_older(probe, cuda):
    """Of a gradient that is older than the region, nothing is retained, but it is in the level."""
    ends, level = set(), level_of(probe)
    for _ in range(REPEATS):
        older = weight_on(cuda)
        with probe.measure() as region:
            run(older)
            del older
        ends.add(region.record.end_bytes)
    assert ends == {level}


@pytest.mark.parametrize("leak_bytes", [0, 1024, MIB])
@pytest.mark.parametrize("batches", [8, 12])
def test_growth_is_exact(probe, cuda, leak_bytes, batches):
    """Neither is clean code accused, nor is a leak made smaller."""
    weight, found = weight_on(cuda), set()
    for _ in range(REPEATS):
        kept = []
        with probe.measure() as region:
            for _ in region.batches(range(batches)):
                run(weight)
                kept += [torch.ones(leak_bytes // 4, device=cuda)] if leak_bytes else []
        found.add(region.growth_bytes_per_batch)
    assert found == {leak_bytes}


def test_growth_is_exact_if_only_the_caller_allocates(probe, cuda):
    """No thread of torch's allocates anything, but one frees what the caller did."""
    weight, found = weight_on(cuda), set()
    for _ in range(REPEATS):
        with probe.measure() as region:
            for _ in region.batches(range(12)):
                run_without_allocation(weight)
        found.add(region.growth_bytes_per_batch)
    assert found == {0}


def test_growth_is_exact_in_a_graph_that_is_kept(probe, cuda):
    """Nothing is new in a batch but the gradient, which the caller allocates."""
    weight, found = weight_on(cuda), set()
    total = weight + 1
    for _ in range(REPEATS):
        with probe.measure() as region:
            torch.autograd.grad(weight.exp().sum(), weight)  # shows that passes run in this region
            for _ in region.batches(range(12)):
                gradient = torch.ones_like(total)
                torch.autograd.grad(total, weight, gradient, retain_graph=True)
                del gradient
        found.add(region.growth_bytes_per_batch)
    assert found == {0}


def test_growth_is_exact_if_the_thread_of_another_device_is_the_last(native, second_device):
    """It holds the gradients of both devices."""
    here, there, found = weight_on(native.device), weight_on(second_device), set()
    for _ in range(REPEATS):
        with native.measure() as region:
            for _ in region.batches(range(12)):
                loss = (there.exp().to(here.device) * here).sum()
                torch.autograd.grad(loss, [here, there])
                del loss
        found.add(region.growth_bytes_per_batch)
    assert found == {0}


@contextmanager
def running_pass(device):
    """Run a pass of another thread in the block; yield what ends it and the thread."""
    begun, end = threading.Event(), threading.Event()

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            begun.set()
            end.wait(60)
            return gradient * 2

    thread = threading.Thread(
        target=lambda: torch.autograd.grad(Waiting.apply(leaf := weight_on(device)).sum(), leaf)
    )
    thread.start()
    try:
        assert begun.wait(60)
        yield end
    finally:
        end.set()
        thread.join()


def test_a_pass_that_does_not_end_is_waited_for_once(probe, cuda):
    """Another thread's pass waits for this one, which would otherwise wait at each boundary."""
    with running_pass(cuda):
        before, weight = set(threading.enumerate()), weight_on(cuda)
        with probe.measure() as region:
            for _ in region.batches(range(200)):
                weight.exp()  # a new graph, so that a pass may have run
            waiting = set(threading.enumerate()) - before
    assert len(waiting) == 1
    assert region.growth_bytes_per_batch == 0


def test_an_end_waits_also_if_the_boundaries_have_given_up(probe, cuda):
    """A boundary waits for a shorter time."""
    with ExitStack() as passes:
        with probe.measure() as region:
            end = passes.enter_context(running_pass(cuda))
            for _ in region.batches(range(2)):
                torch.ones(1, device=cuda, requires_grad=True).exp()
            threading.Timer(0.3, end.set).start()
        assert end.is_set()


def test_a_pass_on_another_device_does_not_end_the_waits(native, second_device):
    """Each device has a thread of its own."""
    weight, found = weight_on(native.device), set()
    run(weight_on(second_device))
    with running_pass(second_device):
        for _ in range(REPEATS):
            with native.measure() as region:
                for _ in region.batches(range(8)):
                    run(weight)
            found.add(region.growth_bytes_per_batch)
    assert found == {0}


def test_what_a_thread_frees_is_no_workspace(probe, cuda):
    """An inner region drops those of libraries when it begins."""
    weight, found = weight_on(cuda), set()
    for _ in range(REPEATS):
        with probe.measure() as outer:
            run(weight)
            with probe.measure():
                pass
        found.add(outer.record.one_time_bytes)
    assert found == {0}


def test_a_wait_does_not_import_sympy(probe, cuda, monkeypatch):
    """The function by which torch checks the gradients of a caller would, in the user's loop."""
    run(weight_on(cuda))
    checked = []
    monkeypatch.setattr(torch.autograd, "_make_grads", lambda *gradients: checked.append(gradients))
    probe.snapshot()
    assert checked == []


def test_nothing_is_added_to_backward_passes_that_are_compiled(probe, cuda):
    """They run in the thread that calls them; a pass that waits would be compiled, too."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    compiled_autograd.reset()  # what was compiled before
    weight, compiled = weight_on(cuda), []
    run(weight)  # starts torch's threads

    def compiler(graph):
        compiled.append(graph)
        return graph

    with compiled_autograd._enable(compiler), probe.measure() as region:
        for _ in region.batches(range(6)):
            weight.exp().sum().backward()
            weight.grad = None
    compiled_autograd.reset()
    assert len(compiled) == 1
    assert region.growth_bytes_per_batch == 0
