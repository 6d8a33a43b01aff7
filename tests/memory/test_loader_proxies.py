"""Loader proxies behave like the loader that they wrap and keep no batch alive."""

import copy
import gc
import itertools
import weakref
from collections import UserDict
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pytest_cka_memory.measure.loaders_and_steps import (
    FirstBatches,
    SampledLoader,
    length_of,
    size_of,
)


class Batch:
    """An object that can be weakly referenced."""

    def __init__(self, size: int) -> None:
        self.shape = (size,)


class Stream(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.fixture
def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(10)), batch_size=4)


def ignore(size: int | None) -> None:
    """Ignore the size of a batch."""


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(4, 3), 4),
        (torch.zeros(0, 3), 0),
        (torch.tensor(1.0), None),
        ((torch.zeros(4), torch.zeros(9)), 4),
        ([torch.zeros(4)], 4),
        ({"x": torch.zeros(4), "y": 1}, 4),
        ({"id": "abcdefg", "x": torch.zeros(4)}, 4),
        (("text", torch.zeros(4)), 4),
        (["a", "b", "c"], 3),
        ([1, 2, 3, 4, 5], 5),
        ([], 0),
        ({}, 0),
        ((torch.tensor(1.0), torch.zeros(4)), 4),
        ([[torch.zeros(6)], torch.zeros(4)], 6),
        (7, None),
        ("text", None),
        (None, None),
        pytest.param(object(), None, id="object"),
        pytest.param(Batch(3), 3, id="has-shape"),
    ],
    ids=lambda value: repr(value).split(" at 0x")[0],
)
def test_the_size_of_a_batch_is_its_first_dimension(batch: object, size: int | None) -> None:
    """The size of a batch is its first dimension, or None if it cannot be determined."""
    assert size_of(batch) == size


def test_a_watched_loader_has_the_type_length_and_attributes_of_its_loader(
    loader: DataLoader[tuple[torch.Tensor, ...]],
) -> None:
    """Consumers check a loader's type, length and attributes, so a watched one has them too."""
    watched = SampledLoader(loader, ignore)
    assert isinstance(watched, DataLoader)
    assert len(watched) == 3
    assert watched.dataset is loader.dataset
    assert watched.batch_size == 4
    assert watched.sampler is loader.sampler
    assert bool(watched)
    with pytest.raises(AttributeError, match=r"DataLoader.* has no attribute 'nonsense'"):
        _ = watched.nonsense


def test_setting_an_attribute_sets_it_on_the_loader(
    loader: DataLoader[tuple[torch.Tensor, ...]],
) -> None:
    """Setting an attribute of a watched loader sets it on the loader, where it has an effect."""
    watched = SampledLoader(loader, ignore)
    watched.worker_init_fn = ignore
    assert loader.worker_init_fn is ignore
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        watched.batch_size = 9


def test_an_indexable_loader_stays_indexable() -> None:
    """A list of batches can be used as a loader, and can be indexed when it is watched."""
    watched = SampledLoader([10, 20, 30], ignore)
    assert watched[1] == 20
    assert isinstance(watched, list)
    assert list(watched) == [10, 20, 30]


def test_len_of_a_loader_without_a_length_raises_the_loaders_own_error() -> None:
    """A watched loader without a length raises its error at ``len``; ``list()`` still works."""
    watched = SampledLoader((i for i in range(3)), ignore)
    with pytest.raises(TypeError, match="object of type 'generator' has no len"):
        len(watched)
    assert list(watched) == [0, 1, 2]


def test_a_proxy_can_be_copied(loader: DataLoader[tuple[torch.Tensor, ...]]) -> None:
    """Trainers copy loaders; ``copy`` reads attributes before any is set, which must not fail."""
    assert copy.copy(FirstBatches(loader, 2)).batch_size == 4
    assert len(copy.deepcopy(FirstBatches([1, 2, 3], 2))) == 2


def test_each_batch_is_reported_when_the_next_is_requested(
    loader: DataLoader[tuple[torch.Tensor, ...]],
) -> None:
    """A batch is done when the next is requested, so it is reported then; the last is, too."""
    sizes: list[int | None] = []
    seen_at: list[int] = []
    for _ in SampledLoader(loader, sizes.append):
        seen_at.append(len(sizes))
    assert seen_at == [0, 1, 2]
    assert sizes == [4, 4, 2]


def test_the_batch_of_an_early_break_is_not_reported() -> None:
    """After an early break the last batch is not reported, because it was not finished."""
    sizes: list[int | None] = []
    for number in SampledLoader([[1], [2], [3]], sizes.append):
        if number == [2]:
            break
    gc.collect()
    assert sizes == [1]


def test_a_second_epoch_is_reported_too() -> None:
    """A watched loader can be iterated as often as its loader, and each epoch is reported."""
    sizes: list[int | None] = []
    watched = SampledLoader([[1], [2, 2]], sizes.append)
    assert list(watched) == list(watched)
    assert sizes == [1, 2, 1, 2]


def test_two_iterations_at_once_are_independent() -> None:
    """In ``zip(loader, loader)`` two iterations run at once, independently."""
    sizes: list[int | None] = []
    watched = SampledLoader([[1], [2]], sizes.append)
    assert list(zip(watched, watched, strict=True)) == [([1], [1]), ([2], [2])]


def test_a_watched_loader_keeps_no_batch_alive() -> None:
    """A watched loader keeps no batch alive, which would be a leak of the measurement itself."""
    alive: list[bool] = []
    references: list[weakref.ref[Batch]] = []

    def batches() -> Iterator[Batch]:
        for _ in range(3):
            batch = Batch(1)
            references.append(weakref.ref(batch))
            yield batch
            del batch

    watched = iter(
        SampledLoader(batches(), lambda size: alive.append(references[-1]() is not None))
    )
    for _ in range(3):
        batch = next(watched)
        del batch
        # Only the generator above, suspended at its yield, still references the batch.
        assert len(gc.get_referrers(references[-1]())) == 1
    with pytest.raises(StopIteration):
        next(watched)


def test_an_exception_in_the_loader_reaches_its_consumer() -> None:
    """An exception in the loader reaches its consumer unchanged."""

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        list(SampledLoader(broken(), ignore))


def test_first_batches_requests_only_the_given_number(
    loader: DataLoader[tuple[torch.Tensor, ...]],
) -> None:
    """``first_batches`` never requests more than the given number of batches."""
    first = FirstBatches(loader, 2)
    assert len(first) == 2
    assert isinstance(first, DataLoader)
    assert [len(batch[0]) for batch in first] == [4, 4]
    assert len(FirstBatches(loader, 9)) == 3
    endless = itertools.count()
    assert list(FirstBatches(endless, 2)) == [0, 1]
    assert next(endless) == 2


def test_first_batches_refuses_a_loader_that_ends_too_soon() -> None:
    """A loader that ends too soon is refused: figures for 4 batches might come from 1."""
    once = iter([1, 2, 3])
    assert list(FirstBatches(once, 2)) == [1, 2]
    with pytest.raises(ValueError, match="ended after 1 of 2 batches; pass one that can be iter"):
        list(FirstBatches(once, 2))


@pytest.mark.parametrize(
    ("made", "length"),
    [
        ([1, 2], 2),
        (iter([1, 2]), None),
        (DataLoader(Stream(), batch_size=2), None),
        (DataLoader(TensorDataset(torch.arange(3))), 3),
        (SampledLoader([1, 2], ignore), 2),
        (SampledLoader(iter([1]), ignore), None),
    ],
    ids=["list", "iterator", "stream", "loader", "watched-list", "watched-iterator"],
)
def test_length_of_returns_none_for_a_loader_without_a_length(
    made: object, length: int | None
) -> None:
    """``len()`` raises for a DataLoader over a dataset without a length; the result is None."""
    assert length_of(made) == length


def test_a_watched_iterator_is_an_iterator() -> None:
    """``next()`` works on a watched iterator, and ends a batch when the next is requested."""
    calls: list[int | None] = []
    watched = SampledLoader(iter([torch.ones(2), torch.ones(3)]), calls.append)
    assert next(watched).shape == (2,)
    assert calls == []
    assert next(watched).shape == (3,)
    assert calls == [2]
    with pytest.raises(StopIteration):
        next(watched)
    assert calls == [2, 3]


def test_a_watched_list_is_not_an_iterator() -> None:
    """``next()`` of a watched list raises the error of a list, which is not an iterator."""
    with pytest.raises(TypeError, match="'list' object is not an iterator"):
        next(SampledLoader([1], lambda size: None))


def test_the_size_of_a_mapping_is_that_of_its_first_tensor() -> None:
    """A mapping, also a UserDict as BatchEncoding is, has the size of its first tensor."""
    assert size_of(UserDict(text=["a", "b"], input_ids=torch.ones(2, 7))) == 2


def test_the_size_of_a_strided_nested_tensor_is_its_number_of_parts() -> None:
    """A strided nested tensor raises if its shape is asked for; its size is its parts' number."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    assert size_of(nested) == 2
