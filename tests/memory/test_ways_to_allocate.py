"""CPU tensors are counted to the byte however they are allocated; their views are not counted.

The expected bytes are those of the storages named, computed by hand.
"""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytest_cka_memory.meters import Meter

RetainedBy = Callable[[Callable[[], object]], int]
OLD = torch.arange(100, dtype=torch.float32)
PICKLED = pickle.dumps(OLD)


@pytest.fixture(autouse=True, scope="module")
def _old(imports_excluded_from_search: None) -> None:
    global OLD
    OLD = torch.arange(100, dtype=torch.float32)


def _saved() -> bytes:
    file = io.BytesIO()
    torch.save({"weight": OLD, "view": OLD[:10]}, file)
    return file.getvalue()


SAVED = _saved()


class Named(torch.Tensor):
    """A subclass whose ``__torch_function__`` sees every call."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Refusing(torch.Tensor):
    """A subclass that raises whenever a torch function is called on it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a torch function was called")


class SpecialParameter(nn.Parameter):
    """A subclass of Parameter, as in libraries for quantisation."""


class Square(torch.autograd.Function):
    """An autograd function that saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def with_gradient(size: int) -> torch.Tensor:
    x = torch.ones(size, requires_grad=True)
    (x * 2).sum().backward()
    return x


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    return model, optimizer


def resized_storage(*sizes: int) -> torch.Tensor:
    tensor = torch.zeros(4)
    for size in sizes:
        tensor.untyped_storage().resize_(size)
    return tensor


def stored_in_place() -> torch.Tensor:
    x = torch.zeros(100)
    return x.add_(1).mul_(2).relu_()


def data_replaced() -> torch.Tensor:
    x = torch.zeros(100)
    x.data = torch.zeros(7)
    return x


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(lambda: torch.zeros(100), 400, id="zeros"),
        pytest.param(lambda: torch.empty(100, dtype=torch.float16), 200, id="empty-half"),
        pytest.param(lambda: torch.empty(0), 0, id="nothing"),
        pytest.param(lambda: torch.Tensor(100), 400, id="Tensor"),
        pytest.param(lambda: torch.tensor([1.0, 2.0]), 8, id="tensor"),
        pytest.param(lambda: torch.tensor(1.0), 4, id="scalar"),
        pytest.param(lambda: OLD.new_tensor([1.0, 2.0]), 8, id="new_tensor"),
        pytest.param(lambda: torch.randperm(10), 80, id="randperm"),
        pytest.param(lambda: torch.from_numpy(np.zeros(100, np.float32)), 400, id="from_numpy"),
        pytest.param(lambda: torch.as_tensor(np.zeros(9, np.float32)), 36, id="as_tensor"),
        pytest.param(lambda: OLD.clone(), 400, id="clone"),
        pytest.param(lambda: OLD + 1, 400, id="operator"),
        pytest.param(
            lambda: [OLD.view(10, 10), OLD[:5], OLD.detach(), OLD[::2]], 0, id="old-views"
        ),
        pytest.param(lambda: [x := torch.zeros(9), x[:1], x.view(3, 3)], 36, id="new-views"),
        pytest.param(lambda: torch.zeros(100)[:1], 400, id="view-holds-all"),
        pytest.param(lambda: torch.zeros(10).expand(1000, 10), 40, id="expand"),
        pytest.param(lambda: [torch.zeros(i) for i in (1, 2, 3)], 24, id="list"),
        pytest.param(lambda: OLD.chunk(4), 0, id="chunks"),
        pytest.param(lambda: OLD.topk(3), 3 * 4 + 3 * 8, id="several-results"),
        pytest.param(stored_in_place, 400, id="in-place"),
        pytest.param(data_replaced, 28, id="data-replaced"),
        pytest.param(lambda: torch.add(OLD, 1, out=torch.empty(100)), 400, id="out"),
        pytest.param(lambda: torch.add(OLD, 1, out=torch.empty(0)), 400, id="out-grown"),
        pytest.param(lambda: torch.zeros(4).resize_(100), 400, id="resize_-grown"),
        pytest.param(lambda: torch.zeros(100).resize_(4), 400, id="resize_-keeps-storage"),
        pytest.param(lambda: resized_storage(400), 400, id="storage-grown"),
        pytest.param(lambda: resized_storage(0), 0, id="storage-emptied"),
        pytest.param(lambda: resized_storage(0, 100), 100, id="storage-emptied-and-regrown"),
        pytest.param(lambda: copy.deepcopy(OLD), 400, id="deepcopy"),
        pytest.param(lambda: copy.copy(OLD), 0, id="copy-shares"),
        pytest.param(lambda: pickle.loads(PICKLED), 400, id="pickle"),
        pytest.param(lambda: torch.load(io.BytesIO(SAVED)), 400, id="load-shares"),
        pytest.param(
            lambda: torch.sparse_coo_tensor(
                [[0, 1], [2, 0]], [1.0, 2.0], (3, 3), check_invariants=True
            ),
            40,
            id="coo",
        ),
        pytest.param(lambda: torch.eye(4).to_sparse_csr(), 40 + 64 + 16, id="csr"),
        pytest.param(lambda: torch.zeros(4, dtype=torch.complex64), 32, id="complex"),
        pytest.param(
            lambda: [z := torch.zeros(4, dtype=torch.complex64), z.real, z.imag, z.conj()],
            32,
            id="complex-parts-share",
        ),
        pytest.param(
            lambda: torch.nested.nested_tensor([OLD[:3], OLD[:5]], layout=torch.jagged),
            8 * 4 + 3 * 8,
            id="jagged",
        ),
        pytest.param(lambda: nn.Parameter(torch.zeros(100)), 400, id="parameter"),
        pytest.param(lambda: SpecialParameter(torch.zeros(100)), 400, id="parameter-subclass"),
        pytest.param(lambda: nn.Linear(10, 10), 440, id="module"),
        pytest.param(lambda: torch.zeros(100).as_subclass(Named), 400, id="subclass"),
        pytest.param(lambda: torch.zeros(9).as_subclass(Named) + 1, 36, id="subclass-operator"),
        pytest.param(lambda: torch.zeros(9).as_subclass(Refusing), 36, id="subclass-refusing"),
        pytest.param(lambda: with_gradient(100), 800, id="gradient"),
        pytest.param(lambda: Square.apply(with_gradient(100)), 1200, id="autograd-function"),
        pytest.param(lambda: torch.ones(9, requires_grad=True).exp(), 72, id="saved-for-backward"),
        # weight, its gradient, two moments, and the step count
        pytest.param(trained, 4 * 400 + 4, id="adam"),
        pytest.param(lambda: torch.vmap(lambda x: x * 2)(torch.zeros(10, 10)), 400, id="vmap"),
        pytest.param(lambda: torch.func.grad(lambda x: (x**2).sum())(OLD), 400, id="functorch"),
        pytest.param(lambda: torch.func.jacrev(torch.sin)(OLD[:5]), 100, id="jacrev"),
        pytest.param(lambda: torch.zeros(100, device="meta"), 0, id="meta"),
        pytest.param(lambda: OLD.numpy(), 0, id="numpy-shares"),
        pytest.param(lambda: [OLD.sum().item(), OLD.tolist()], 0, id="plain-numbers"),
    ],
)
def test_what_an_operator_allocates_is_counted_at_once(
    retained_by: RetainedBy, make: Callable[[], object], size: int
) -> None:
    """What an operator allocates is counted at once, without a walk over live objects."""
    assert retained_by(make) == size


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_strided_nested_tensor_owns_its_data_and_three_tables(
    retained_by: RetainedBy, is_native: bool
) -> None:
    """C++ owns the sizes, strides and offsets of a nested tensor: only the allocator knows them."""
    made = retained_by(lambda: torch.nested.nested_tensor([OLD[:3], OLD[:5]], layout=torch.strided))
    assert made == 8 * 4 + (3 * 2 * 8 if is_native else 0)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(lambda: torch.tensor([1.0] * 25), 100, id="tensor"),
        pytest.param(lambda: torch.as_tensor([1.0] * 25), 100, id="as_tensor"),
        pytest.param(lambda: torch.from_numpy(np.zeros(25, np.float32)), 100, id="from_numpy"),
        pytest.param(lambda: torch.zeros(25), 100, id="operator"),
    ],
)
def test_what_a_hook_allocates_in_a_backward_pass_is_counted(
    retained_by: RetainedBy, make: Callable[[], object], size: int
) -> None:
    """In a backward pass, a hook's tensors count; older ones that first appear there do not."""
    weight = torch.ones(4, requires_grad=True)
    weight.grad = torch.zeros(4)
    loss, kept = (weight * 2).sum(), []
    weight.register_hook(lambda gradient: kept.append(make()))

    def backward() -> list[object]:
        loss.backward()
        return kept

    assert retained_by(backward) == size


@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(lambda: torch.UntypedStorage(100), 100, id="untyped-storage"),
        pytest.param(lambda: torch.UntypedStorage(1).resize_(100), 100, id="untyped-storage-grown"),
        pytest.param(lambda: torch.frombuffer(bytearray(64), dtype=torch.uint8), 64, id="buffer"),
        pytest.param(lambda: torch.asarray(bytearray(64), dtype=torch.uint8), 64, id="asarray"),
        pytest.param(lambda: torch.from_dlpack(np.zeros(4, np.float32)), 16, id="dlpack"),
    ],
)
def test_storages_allocated_without_an_operator_are_counted_when_read(
    counting: Meter, make: Callable[[], object], size: int
) -> None:
    """Storages allocated without an operator are found by a walk over young objects."""
    mark, before = counting.mark(), counting.read().allocated_bytes
    kept = make()
    assert counting.read().allocated_bytes - before == size
    assert counting.retained_since(mark) == size
    del kept
    assert counting.read().allocated_bytes == before


def test_memory_of_a_tensor_that_is_lent_to_another_is_counted_once(
    counting: Meter, is_native: bool
) -> None:
    """Memory that one tensor lends another is counted once, although there are two storages."""
    mark = counting.mark()
    kept = torch.utils.dlpack.from_dlpack(OLD)
    counting.read()
    assert counting.retained_since(mark) == (0 if is_native else 400)
    assert kept.data_ptr() == OLD.data_ptr()


@pytest.mark.parametrize("generation", [None, 0, 1, 2])
def test_a_reading_is_the_same_after_a_collection_of_any_generation(
    counting: Meter, generation: int | None
) -> None:
    """A collection of any generation does not change a reading.

    The graph keeps the factor as a tensor that no operator returned. A flat loop would seem to grow
    if promoting it changed the reading.
    """
    weight = torch.zeros(100, requires_grad=True)
    before = counting.read().allocated_bytes
    kept = weight * 0.5
    if generation is not None:
        gc.collect(generation)
    assert counting.read().allocated_bytes - before == 400 + 8
    del kept


def test_tensors_of_inference_mode_are_counted(retained_by: RetainedBy) -> None:
    """Tensors of inference mode have no version counter, and are counted."""

    def infer() -> torch.Tensor:
        with torch.inference_mode():
            return nn.functional.relu(OLD.view(10, 10) @ OLD.view(10, 10))

    assert retained_by(infer) == 400


def test_freeing_an_old_tensor_lowers_the_level_but_not_retained(counting: Meter) -> None:
    """Freeing an old tensor makes net negative and leaves retained as it is."""
    old = torch.zeros(100)
    mark, before = counting.mark(), counting.read().allocated_bytes
    del old
    new = torch.zeros(10)
    assert counting.read().allocated_bytes - before == 40 - 400
    assert counting.retained_since(mark) == 40
    del new


def test_the_peak_counts_what_is_live_at_the_same_time(counting: Meter, is_native: bool) -> None:
    """The peak counts what is live at a time: two of the three temporaries, and a number."""
    number = 8 + 4 if is_native else 0  # 1 as int64 and as float32
    counting.reset_peak()
    before = counting.read().allocated_bytes
    x = torch.zeros(100)
    x = x + 1
    x = x + 1
    assert counting.read().peak_bytes - before == 800 + number
    counting.reset_peak()
    assert counting.read().peak_bytes - before == 400
    del x


def test_an_operator_that_raises_adds_nothing(counting: Meter) -> None:
    """An operator that raises has no result, and its arguments are counted already."""
    mark = counting.mark()
    with pytest.raises(RuntimeError, match="must match the size"):
        _ = OLD + OLD[:3]
    assert counting.retained_since(mark) == 0


def test_live_bytes_agree_with_an_independent_sum(counting: Meter) -> None:
    """Live bytes of a training step agree with the sum over parameters, gradients and state."""
    mark = counting.mark()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    optimizer = torch.optim.Adam(model.parameters())
    loss = nn.functional.cross_entropy(model(torch.ones(2, 3, 8, 8)), torch.tensor([0, 1]))
    loss.backward()
    optimizer.step()
    known = [loss, *model.parameters(), *model.buffers()]
    known += [p.grad for p in model.parameters() if p.grad is not None]
    known += [t for state in optimizer.state.values() for t in state.values()]
    loss = loss.detach()  # frees the graph
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in known}
    del known
    assert counting.retained_since(mark) == sum(storages.values())
