"""Regions on the CPU while ``gc.freeze`` hides objects from the search for live tensors."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from pytest_cka_memory import MemoryProbe

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")


@pytest.fixture(scope="module", autouse=True)
def _imports_excluded() -> None:
    """Freeze nothing for this module, in place of the folder's fixture; its tests freeze."""


def test_frozen_objects_are_not_counted(cpu: MemoryProbe) -> None:
    """``gc.freeze`` hides objects from the search; tensors that are new after it are counted."""
    old = torch.zeros(100)
    gc.collect()
    gc.freeze()
    try:
        with cpu.measure() as region:
            new = old + 1
            old.add_(1)
    finally:
        gc.unfreeze()
    assert region.retained_bytes == 400
    del new


@pytest.fixture
def frozen() -> Iterator[torch.nn.Linear]:
    """A module whose gradients nothing in Python references, frozen with all that is alive."""
    module = torch.nn.Linear(10, 10, bias=False)
    module(torch.ones(1, 10)).sum().backward()
    module.register_buffer("sparse", module.weight.detach().to_sparse())
    module.register_buffer("rows", module.weight.detach().to_sparse_csr())
    gc.collect()
    gc.freeze()
    yield module
    gc.unfreeze()


def in_another_thread(function: Callable[[], object]) -> object:
    """Return what a function returns in another thread, whose operators the ledger does not see."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_what_another_thread_allocates_is_found(cpu: MemoryProbe, frozen: object) -> None:
    with cpu.measure() as region:
        kept = in_another_thread(lambda: torch.ones(250))
    assert region.retained_bytes == 1000
    with cpu.measure() as region:
        for _ in region.batches(range(8)):
            kept = [kept, in_another_thread(lambda: torch.ones(250))]
    assert region.growth_bytes_per_batch == 1000


def test_shared_memory_of_another_thread_is_found_if_nothing_is_frozen(cpu: MemoryProbe) -> None:
    """The collector of Python 3.12 freezes some objects of its own; they do not count."""
    gc.collect()
    with cpu.measure() as region:
        kept = in_another_thread(lambda: torch.ones(250).split(1))
    assert region.retained_bytes == 1000
    del kept


@pytest.mark.parametrize(
    "use",
    [
        lambda module: module.weight.detach(),
        lambda module: module.weight.data,
        lambda module: module.weight[2:],
        lambda module: module.weight.grad,
        lambda module: module.weight.untyped_storage(),
        lambda module: [module.weight.detach(), module.weight[1:], module.weight.grad[1:]],
        lambda module: TwoTensor(module.weight.detach(), module.weight.detach()),
        lambda module: TwoTensor(module.weight.grad, module.weight.grad),
        lambda module: torch.nn.Parameter(module.sparse, requires_grad=False),
        lambda module: module.sparse.detach(),
        lambda module: module.rows.data,
    ],
    ids=[
        "detached", "data", "view", "gradient", "storage", "several", "new wrapper", "wrapper",
        "sparse parameter", "sparse", "sparse rows",
    ],
)  # fmt: skip
def test_memory_of_frozen_objects_is_older(
    cpu: MemoryProbe, frozen: torch.nn.Linear, use: Callable[[torch.nn.Linear], object]
) -> None:
    """Objects that are made in the region use memory that is older, whoever makes them."""
    with cpu.measure() as region:
        kept = [use(frozen), in_another_thread(lambda: use(frozen))]
    assert region.retained_bytes == 0
    del kept


def test_a_frozen_gradient_of_another_parameter_is_older(
    cpu: MemoryProbe, frozen: torch.nn.Linear
) -> None:
    other = torch.nn.Parameter(torch.ones(10, 10))
    with cpu.measure() as region:
        other.grad = frozen.weight.grad
    assert region.retained_bytes == 0


def test_objects_that_are_frozen_no_more_are_older(cpu: MemoryProbe, frozen: object) -> None:
    with cpu.measure() as region:
        for batch in region.batches(range(8)):
            if batch == 4:
                gc.unfreeze()
    assert region.retained_bytes == 0
    assert region.growth_bytes_per_batch == 0
