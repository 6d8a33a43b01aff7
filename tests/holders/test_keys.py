"""Storages are found by two keys: their address in C++ and the address of their data."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from planted import KEEP, cleaned_up
from searched import Source

from pytest_cka_memory import Holding
from pytest_cka_memory.core.allocations import Allocation, AllocationSite, RecordedSite
from pytest_cka_memory.holders.survivors import holdings


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield


class At:
    """A site that is recorded in readable form."""

    def __init__(self, site: AllocationSite) -> None:
        self.site = site

    def readable(self) -> AllocationSite:
        return self.site


BY_FRAMES = At(AllocationSite(("train.py:12 in step",), "(weight * batch).sum()"))
BY_LEDGER = At(AllocationSite(("train.py:12 in step",), None, "aten.sum", "int8", (7,)))


def found_at(key: int, recorded: RecordedSite | None = BY_FRAMES) -> Holding:
    """Return what is found about a block of 1000 bytes that has `key`."""
    (holding,) = holdings([Allocation(key, 1000, 1, Source(), recorded)], {})
    return holding


def data_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TestAddressOfTheData:
    def test_the_holder_of_a_tensor_is_found(self) -> None:
        """A tensor's holder, dtype and shape are found even if only frames were recorded."""
        KEEP.append({"x": torch.ones(25, 10, dtype=torch.float16)})
        found = found_at(data_key(KEEP[0]["x"]))
        assert found == Holding(
            bytes=1000,
            count=1,
            dtype="float16",
            shape=(25, 10),
            created_at=("train.py:12 in step",),
            held_by="planted.KEEP[0]['x']",
            code="(weight * batch).sum()",
            freed_bytes=1000,
        )

    def test_what_was_recorded_is_preferred_to_the_tensor_that_was_found(self) -> None:
        """The recorded dtype and shape are shown, because the tensor found may be a view of the
        result.
        """
        KEEP.append(torch.ones(250))
        found = found_at(data_key(KEEP[0]), BY_LEDGER)
        assert (found.dtype, found.shape, found.operator) == ("int8", (7,), "aten.sum")

    def test_a_view_is_found_by_the_address_where_its_storage_begins(self) -> None:
        """A view whose data begins later is found by the start of
        its storage, with its own shape.
        """
        KEEP.append(torch.ones(250)[100:110])
        found = found_at(data_key(KEEP[0]))
        assert (found.held_by, found.shape) == ("planted.KEEP[0]", (10,))
        assert "clone()" in str(found.hint)

    def test_an_empty_view_is_found(self) -> None:
        """An empty view has no data, but it keeps its storage alive and is found."""
        KEEP.append(torch.ones(250)[:0])
        found = found_at(data_key(KEEP[0]))
        assert found.held_by == "planted.KEEP[0]"

    def test_a_storage_without_a_tensor_has_no_dtype_and_shape(self) -> None:
        """A storage consists of bytes, so one without a tensor has no dtype and shape."""
        KEEP.append(torch.ones(250).untyped_storage())
        found = found_at(KEEP[0].data_ptr())
        assert (found.held_by, found.dtype, found.shape) == ("planted.KEEP[0]", None, None)

    @pytest.mark.parametrize("part", [torch.Tensor._indices, torch.Tensor._values])
    def test_the_parts_of_a_sparse_tensor_are_found(
        self, part: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """The indices and the values of a sparse tensor both lead to the tensor."""
        KEEP.append(torch.eye(10).to_sparse())
        found = found_at(data_key(part(KEEP[0])))
        assert (found.held_by, found.shape) == ("planted.KEEP[0]", (10, 10))

    def test_an_array_that_shares_the_data_is_found(self) -> None:
        """A NumPy array is found as the holder, because it references the tensor whose data it
        shares.
        """
        pytest.importorskip("numpy")
        tensor = torch.ones(250)
        key = data_key(tensor)
        KEEP.append(tensor.numpy())
        del tensor
        found = found_at(key)
        assert str(found.held_by).startswith("planted.KEEP[0]")

    def test_freed_memory_is_left_out(self) -> None:
        """Freed memory is left out, even if another tensor now has its address."""
        KEEP.append(torch.ones(250))
        allocation = Allocation(data_key(KEEP[0]), 1000, 1, Source(lives=False), BY_FRAMES)
        assert holdings([allocation], {}) == ()


NOWHERE = 1
"""A key that no storage has: as if only C++ referenced the memory."""
CACHE = "cache_enabled=False"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorded", "options", "expected"),
    [
        pytest.param(BY_FRAMES, {}, CACHE, id="frames"),
        pytest.param(None, {}, CACHE, id="nothing-recorded"),
        pytest.param(BY_LEDGER, {}, "C++ code keeps it", id="another-operator"),
        pytest.param(BY_FRAMES, {"cache_enabled": False}, "C++ code keeps it", id="no-cache"),
    ],
)
def test_the_cache_of_autocast_is_named_if_it_can_be_the_holder(
    recorded: RecordedSite | None, options: dict[str, bool], expected: str
) -> None:
    """In a block that caches casts, autocast's cache is named for memory that may be a cast."""
    with torch.autocast("cpu", torch.bfloat16, **options):
        assert expected in str(found_at(NOWHERE, recorded).hint)
        with torch.autocast("cpu", enabled=False, **options):
            assert expected in str(found_at(NOWHERE, recorded).hint)
    assert CACHE not in str(found_at(NOWHERE, recorded).hint)


class Overriding(torch.Tensor):
    """A tensor whose attributes are not those of tensors."""

    @property
    def shape(self) -> Any:
        raise AssertionError("the user's code was run")

    dtype = nbytes = shape


def test_shapes_are_read_without_running_code_of_the_user() -> None:
    """Shapes are read without a subclass's own attributes, which could run any code."""
    KEEP.append(torch.ones(250).as_subclass(Overriding))
    address = torch.Tensor.untyped_storage(KEEP[0]).data_ptr()
    found = found_at(address)
    assert (found.dtype, found.shape, found.hint) == ("float32", (250,), None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_a_dtype_only() -> None:
    """The parts of a nested tensor differ in shape, so only its dtype is shown."""
    KEEP.append(torch.nested.nested_tensor([torch.ones(100), torch.ones(150)]))
    found = found_at(data_key(KEEP[0]))
    assert (found.held_by, found.dtype, found.shape) == ("planted.KEEP[0]", "float32", None)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.ones(3, device="meta"), id="meta"),
        pytest.param(lambda: torch.empty(0), id="empty"),
        pytest.param(lambda: torch.ones(3).to_mkldnn(), id="mkldnn"),
        pytest.param(lambda: fake(), id="fake"),
        pytest.param(lambda: fake().untyped_storage(), id="storage-of-fake"),
        pytest.param(lambda: wrapped_by_functorch(), id="functorch"),
        pytest.param(lambda: torch._lazy_clone(torch.ones(3)), id="lazy-clone"),
    ],
)
def test_tensors_without_data_do_not_stop_the_search(make: Callable[[], Any]) -> None:
    """Tensors without data neither stop the search nor cause a warning."""
    KEEP.extend([make(), torch.ones(250)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = found_at(data_key(KEEP[1]))
    assert found.held_by == "planted.KEEP[1]"


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def wrapped_by_functorch() -> torch.Tensor:
    kept: list[torch.Tensor] = []
    torch.func.vmap(lambda x: (kept.append(x), x.sum())[1])(torch.ones(2, 3))
    return kept[0]
