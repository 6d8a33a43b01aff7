"""What a census says that garbage keeps alive is what a collection then frees."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from garbage_programs import KeepsInput, no_automatic_collections
from growth_programs import Cycle
from torch.utils.checkpoint import checkpoint

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.measure.census import Beginning, Census
from pytest_cka_memory.meters import torch_private

SIZE = 5000


def leaf() -> torch.Tensor:
    return torch.ones(SIZE, requires_grad=True)


def tensor() -> None:
    Cycle(torch.ones(SIZE))


def view() -> None:
    Cycle(torch.ones(SIZE)[5:])


def several_views() -> None:
    value = torch.ones(SIZE)
    Cycle([value[:5], value[5:]])


def view_of_what_is_in_use() -> torch.Tensor:
    value = torch.ones(SIZE)
    Cycle([value[:5], torch.ones(SIZE)])
    return value


def shared_with_what_is_in_use() -> list[torch.Tensor]:
    value = torch.ones(SIZE)
    Cycle(value)
    return [value]


def graph() -> None:
    Cycle((leaf() * 2).exp().sum())


def graph_of_which_a_part_is_in_use() -> torch.Tensor:
    middle = (leaf() * 2).exp()
    Cycle((middle * 3).sin().sum())
    return middle


def graph_in_use() -> torch.Tensor:
    result = (leaf() * 2).exp().sum()
    Cycle(result)
    return result


def only_the_node() -> None:
    Cycle((leaf() * 2).exp().grad_fn)


def node_in_use() -> Any:
    result = (leaf() * 2).exp()
    Cycle(result)
    return result.grad_fn


def gradient() -> None:
    weight = leaf()
    (weight * 2).sum().backward()
    Cycle(weight)


def graph_after_backward() -> None:
    weight = leaf()
    loss = (weight * 2).exp().sum()
    loss.backward()
    Cycle([loss, weight])


def graph_of_a_gradient() -> None:
    weight = leaf()
    found = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    Cycle(found)


def custom_function() -> None:
    Cycle(KeepsInput.apply(leaf() * 2))


def context_in_a_cycle() -> None:
    result = KeepsInput.apply(leaf() * 2)
    result.grad_fn.me = result  # type: ignore[union-attr]


def checkpointed() -> None:
    Cycle(checkpoint(torch.exp, leaf() * 2, use_reentrant=False))


def checkpointed_with_reentry() -> None:
    Cycle(checkpoint(torch.exp, leaf() * 2, use_reentrant=True))


def tensor_hook() -> None:
    value = leaf() * 2
    value.register_hook(lambda grad: grad * value)
    value.exp()


def module() -> None:
    layer = torch.nn.Linear(70, 70)
    layer.me = layer  # type: ignore[assignment]


def module_with_hook() -> None:
    layer = torch.nn.Linear(70, 70)
    layer.register_forward_hook(lambda *_: layer)
    Cycle(layer(torch.ones(70, 70)))


def optimizer() -> None:
    layer = torch.nn.Linear(70, 70)
    steps = torch.optim.Adam(layer.parameters())
    layer(torch.ones(70, 70)).sum().backward()
    steps.step()
    Cycle(steps)


def numpy_array() -> None:
    Cycle(torch.ones(SIZE).numpy())


def tensor_over_an_array() -> None:
    array = torch.ones(SIZE).numpy()
    Cycle(torch.from_numpy(array))


def object_array() -> None:
    import numpy as np

    Cycle(np.array([torch.ones(SIZE), None], dtype=object))


def storage() -> None:
    Cycle(torch.ones(SIZE).untyped_storage())


def sparse() -> None:
    Cycle(torch.eye(60).to_sparse())


def parameter_of_another() -> None:
    weight = torch.nn.Parameter(torch.ones(SIZE))
    weight.me = weight  # type: ignore[attr-defined]


def generator() -> None:
    def values() -> Any:
        value = torch.ones(SIZE)
        yield value
        yield me

    me = values()
    next(me)


def closure() -> None:
    value = torch.ones(SIZE)

    def run() -> Any:
        return value, run


def exception() -> None:
    value = torch.ones(SIZE)
    try:
        raise ValueError(value.numel())
    except ValueError as error:
        kept = error
    del value
    Cycle(kept)


def weakly_referenced() -> list[Any]:
    cycle = Cycle(torch.ones(SIZE))
    return [weakref.ref(cycle), weakref.ref(cycle.value)]


def deep_chain() -> None:
    value = leaf()
    for _ in range(300):
        value = value + 1
    Cycle(value)


def several_cycles_with_one_graph() -> None:
    result = (leaf() * 2).exp()
    Cycle(result)
    Cycle(result * 2)


PROGRAMS = (
    *(tensor, view, several_views, view_of_what_is_in_use, shared_with_what_is_in_use, graph),
    *(graph_of_which_a_part_is_in_use, graph_in_use, only_the_node, node_in_use, gradient),
    *(graph_after_backward, graph_of_a_gradient, custom_function, context_in_a_cycle),
    *(checkpointed_with_reentry, tensor_hook, module, module_with_hook, optimizer, numpy_array),
    *(
        tensor_over_an_array,
        object_array,
        storage,
        sparse,
        parameter_of_another,
        generator,
        closure,
    ),
    *(exception, weakly_referenced, deep_chain, several_cycles_with_one_graph),
)


@pytest.fixture
def counted(cpu: MemoryProbe, is_native: bool) -> Callable[[Callable[[], Any]], tuple[Any, int]]:
    """Return a function that runs a program and returns what a census finds, and what is freed."""
    meter = cpu.meter
    if not is_native:
        pytest.skip("the ledger knows no blocks")

    def counted(program: Callable[[], Any]) -> tuple[Any, int]:
        with no_automatic_collections(), cpu.measure():
            beginning = Beginning(meter, meter.mark(), lambda garbage, serials: None)
            census = beginning.census
            if census is None:
                pytest.skip("this interpreter's lists of objects are not known")
            assert isinstance(census, Census)
            kept = program()
            found = census.count(0)
            before = meter.read().requested_bytes
            gc.collect()
            after = meter.read().requested_bytes
            del kept
        return None if found is None else found.requested_bytes, before - after

    return counted


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_garbage_keeps_alive_is_what_a_collection_frees(counted, program) -> None:
    """The bytes that a census finds are those that a collection frees right afterwards."""
    program()  # what torch makes once
    gc.collect()
    found, freed = counted(program)
    assert found == freed


@pytest.fixture
def begun(cpu: MemoryProbe, is_native: bool) -> Callable[[], Census]:
    """Return a function that begins a census in a region that is open."""
    if not is_native:
        pytest.skip("the ledger knows no blocks")

    def begun() -> Census:
        census = Beginning(cpu.meter, cpu.meter.mark(), lambda garbage, serials: None).census
        if census is None:
            pytest.skip("this interpreter's lists of objects are not known")
        assert isinstance(census, Census)
        return census

    return begun


def keep_views(owners: list[Cycle | None], views: list[int]) -> None:
    """Let the first so many owners keep a view of the first storage, and so on."""
    for count in views:
        value = torch.ones(SIZE)
        for owner in owners[:count]:
            assert owner is not None
            owner.value.append(value.view(-1))


@pytest.mark.parametrize("views", [[2], [3, 2], [3, 3, 2, 1], [4, 3, 2, 2]])
def test_a_storage_is_garbage_when_the_last_cycle_with_a_view_of_it_is(
    cpu: MemoryProbe, begun: Callable[[], Census], views: list[int]
) -> None:
    """One cycle is dropped first, and looked at before the others are dropped together."""
    with no_automatic_collections(), cpu.measure():
        census = begun()
        owners: list[Cycle | None] = [Cycle([]) for _ in range(max(views))]
        keep_views(owners, views)
        owners[-1] = None
        first = census.count(0)
        owners.clear()
        second = census.count(0)
    assert first is not None
    assert second is not None
    assert (first.requested_bytes, second.requested_bytes) == (0, 4 * SIZE * len(views))


@pytest.mark.parametrize("views", [[2], [1, 2], [3, 2, 1]])
def test_a_storage_that_several_older_cycles_have_views_of_is_garbage_with_them(
    cpu: MemoryProbe, begun: Callable[[], Census], views: list[int]
) -> None:
    """None of the cycles would free it alone, and no reference leads from one to another."""
    with no_automatic_collections():
        owners: list[Cycle | None] = [Cycle([]) for _ in range(3)]
        with cpu.measure():
            census = begun()
            keep_views(owners, views)
            owners.clear()
            older = census.older()
    assert older is not None
    assert sum(it.requested_bytes for it in older) == 4 * SIZE * len(views)


def in_place_on_a_view() -> None:
    value = leaf() * 2
    value[: SIZE // 2].mul_(3).exp_()
    Cycle(value)


def list_of_tensors() -> None:
    Cycle(torch._foreach_mul([leaf() * 2, leaf() * 2], 2.0))


def conjugate() -> None:
    Cycle(torch.fft.fft(leaf()).conj().imag)


def capsule() -> None:
    Cycle(torch.utils.dlpack.to_dlpack(torch.ones(SIZE)))


def future() -> None:
    found = torch.futures.Future()
    found.set_result(torch.ones(SIZE))
    Cycle(found)


def traced() -> None:
    Cycle(torch.jit.trace(torch.nn.Linear(70, 70), torch.ones(70, 70)))


def records() -> None:
    import numpy as np

    found = np.zeros(1, dtype=[("value", object)])
    found["value"][0] = torch.ones(SIZE)
    Cycle(found)


CACHE: weakref.WeakKeyDictionary[Cycle, torch.Tensor] = weakref.WeakKeyDictionary()


def weak_key() -> None:
    CACHE[Cycle(None)] = torch.ones(SIZE)


def deep_graph() -> None:
    value = leaf()
    for _ in range(60_000):
        value = value + 1
    Cycle(value)


OPAQUE = (
    *(in_place_on_a_view, list_of_tensors, conjugate, capsule, future, traced, records, weak_key),
    deep_graph,
)


@pytest.mark.slow
@pytest.mark.parametrize("program", OPAQUE)
def test_what_python_does_not_show_is_said_to_be_unknown(counted, program) -> None:
    """Then a region collects instead: nothing that garbage keeps in C++ is taken for in use."""
    program()
    gc.collect()
    found, freed = counted(program)
    assert found is None
    assert freed > 0


def test_a_region_with_such_garbage_collects_it_and_says_so(cpu: MemoryProbe) -> None:
    """Its growth is still that of the loop."""
    with no_automatic_collections(), cpu.measure() as region:
        for _ in region.batches(range(12)):
            weak_key()
    assert region.growth_bytes_per_batch == 0
    assert region.record.garbage_freed


def packed() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda it: [it * 2], lambda it: it[0]):
        Cycle((leaf() * 2).exp())


@pytest.mark.parametrize("program", [packed, checkpointed])
def test_what_hooks_have_packed_is_counted_or_said_to_be_unknown(counted, program) -> None:
    """Before torch 2.10 what a hook of ``saved_tensors_hooks`` returned cannot be read."""
    program()
    gc.collect()
    found, freed = counted(program)
    assert found == (freed if torch_private.SHOWS_SAVED else None)
    assert freed > 4 * SIZE
