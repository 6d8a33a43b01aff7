"""What is said about the references to a storage is true: deleting them frees it, or does not."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from planted import KEEP, cleaned_up
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_cka_memory import Holding, MemoryProbe
from pytest_cka_memory.reports import failure

OTHER: dict[str, Any] = {}


class Node:
    """An object with an attribute."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield
    OTHER.clear()


def hooked(x: torch.Tensor) -> nn.Module:
    net = nn.Identity()
    net.register_forward_hook(lambda *_: x)
    return net


def leaking(keep: Callable[[torch.Tensor], None]) -> tuple[Holding, StorageWeakRef]:
    """Return what is reported about a tensor that `keep` stores, and a weak reference to it."""

    def plant() -> StorageWeakRef:
        x = torch.ones(250)
        keep(x)
        return StorageWeakRef(x.untyped_storage())

    with MemoryProbe("cpu").measure() as region:
        storage = plant()
    (holding,) = region.retained
    return holding, storage


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, lambda x: [x], lambda x: {"x": x}, lambda x: (x,), Node, hooked, nn.Parameter],
    ids=["tensor", "list", "dict", "tuple", "attribute", "hook", "parameter"],
)
def test_the_only_reference_is_proved_and_frees_the_storage(wrap: Callable[[Any], Any]) -> None:
    """If one reference keeps a tensor, all its bytes are claimed, and deleting it frees them."""
    holding, storage = leaking(lambda x: KEEP.append(wrap(x)))
    assert (holding.freed_bytes, holding.also_held_by) == (1000, ())
    assert not storage.expired()
    KEEP.clear()
    assert storage.expired()


def test_two_holders_are_both_named_and_neither_alone_frees_the_storage() -> None:
    """If two references keep a tensor, both are named, because one of them frees nothing."""

    def keep(x: torch.Tensor) -> None:
        KEEP.append(x)
        OTHER["x"] = x

    holding, storage = leaking(keep)
    named = {str(holding.held_by), *holding.also_held_by}
    assert named == {"planted.KEEP[0]", "test_proof.OTHER['x']"}
    assert holding.freed_bytes is None
    text = " ".join(" ".join(failure.holding_lines(holding)).split())
    assert "both references must be removed to free it" in text
    KEEP.clear()
    assert not storage.expired()
    OTHER.clear()
    assert storage.expired()


def test_a_local_variable_beside_a_container_is_named() -> None:
    """A tensor in a list that a variable of the running test references too has two holders."""
    with MemoryProbe("cpu").measure() as region:
        x = torch.ones(250)
        KEEP.append(x)
    (holding,) = region.retained
    assert str(holding.held_by).startswith("x in test_a_local_variable")
    assert (holding.freed_bytes, holding.also_held_by) == (None, ("planted.KEEP[0]",))


class Box:
    """Has a tensor as an attribute."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    "box", [Box, lambda x: [x], lambda x: (x,), lambda x: lambda: x, lambda x: {"a": [x]}]
)
def test_local_object_that_a_container_has_too_is_not_said_to_be_freed_by_del(box: Any) -> None:
    """Advice to delete a local variable would free nothing if a list has the same object."""
    with MemoryProbe("cpu").measure() as region:
        b = box(torch.ones(250))
        KEEP.append(b)
    (holding,) = region.retained
    assert str(holding.hint).startswith("b in test_local_object_that_a_container_has_too")
    assert " and planted.KEEP[0] are the same object; if the measured" in str(holding.hint)


def test_module_that_a_container_has_too_is_named_for_each_of_its_parameters() -> None:
    """One search finds the other name for all tensors of an object."""
    with MemoryProbe("cpu").measure() as region:
        module = nn.Linear(30, 20)
        KEEP.append(module)
    assert len(region.retained) == 2
    for holding in region.retained:
        assert " and planted.KEEP[0] are the same object" in str(holding.hint), holding.hint


def test_class_with_an_instance_is_not_said_to_be_the_same_object() -> None:
    """An instance references its class, but that is no reference that a user can remove."""

    class Net:
        cache: ClassVar[dict[str, Any]] = {}

    net = Net()
    with MemoryProbe("cpu").measure() as region:
        Net.cache["x"] = torch.ones(250)
    (holding,) = region.retained
    assert "same object" not in str(holding.hint)
    del net


@pytest.mark.slow
def test_object_that_references_itself_is_freed_by_del() -> None:
    """A reference cycle is no other name, so the advice to delete the variable stays."""
    with MemoryProbe("cpu").measure() as region:
        b = Box(torch.ones(250))
        b.itself = b  # type: ignore[attr-defined]
    (holding,) = region.retained
    assert "write `del b` at the end of the block" in str(holding.hint)


def with_view(x: torch.Tensor) -> None:
    KEEP.append(x)
    OTHER["view"] = x[:2]


def with_a_graph(x: torch.Tensor) -> None:
    KEEP.append(x)
    OTHER["y"] = nn.Parameter(torch.ones(())) * x


def with_a_grad(x: torch.Tensor) -> None:
    weight = nn.Parameter(x)
    weight.grad = weight.detach()
    KEEP.append(weight)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [with_view, with_a_graph, with_a_grad])
def test_nothing_is_claimed_if_c_code_uses_the_storage(
    keep: Callable[[torch.Tensor], None],
) -> None:
    """A storage that a view, a graph or a gradient uses too is not claimed by one reference."""
    with MemoryProbe("cpu").measure() as region:
        keep(torch.ones(250))
    largest = next(holding for holding in region.retained if holding.bytes == 1000)
    assert largest.freed_bytes is None


def test_all_of_a_group_are_claimed_and_the_text_has_both_sizes() -> None:
    """The claim of a group is the sum of its tensors; it is written from 1 MB."""
    with MemoryProbe("cpu").measure() as region:
        KEEP.extend(torch.ones(2**17) for _ in range(4))
        OTHER["x"] = KEEP[-1]
    (group,) = region.retained
    assert (group.bytes, group.freed_bytes) == (2**21, 3 * 2**19)
    text = " ".join(" ".join(failure.holding_lines(group)).split())
    assert "freeing them would release 1.50 MB of 2.00 MB" in text
