"""What a million paths have in common is found from one tree, as from a list of each path."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from planted import KEEP, cleaned_up

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.holders import Paths, Reference, ReferenceTree, Root, without_broken

TENSORS = 300


class Thing:
    """An object on a path."""


class Node(Thing):
    """An object of another kind."""


def made_tree(seed: int) -> tuple[ReferenceTree, list[int]]:
    """Return a random tree below two names, and the keys of some of its objects."""
    numbers = random.Random(seed)
    values: list[Thing] = [Thing(), Thing()]
    root = Root("net.", "", {})
    references = {id(it): Reference(it, None, root, f"x{n}") for n, it in enumerate(values)}
    for _ in range(numbers.randrange(5, 60)):
        value = numbers.choice((Thing, Node))()
        parent = numbers.choice(values[-numbers.randrange(1, 8) :])
        references[id(value)] = Reference(value, parent)
        values.append(value)
    keys = numbers.sample(range(len(values)), numbers.randrange(1, 6))
    return ReferenceTree(references, dict(enumerate(values))), keys


@pytest.mark.parametrize("seed", range(200))
def test_what_paths_share_is_what_lists_of_them_show(seed: int) -> None:
    """Shared references, branches and lengths are those of the paths, written out."""
    tree, keys = made_tree(seed)
    found = Paths(tree, [tree.last(key) for key in keys])
    written = [tree.path(key) for key in keys]
    count = 0
    while (
        count < min(map(len, written)) - 1 and len({id(path[count].value) for path in written}) == 1
    ):
        count += 1
    assert [id(it) for it in found.first] == [id(it) for it in written[0]]
    assert [id(it) for it in found.shared] == [id(it) for it in written[0][:count]]
    assert found.branches == len({id(path[count].value) for path in written})
    assert found.longest == max(map(len, written))
    nodes = {id(it.value) for path in written for it in path if type(it.value) is Node}
    assert found.objects_of(Node) == len(nodes)


@pytest.mark.parametrize("seed", range(200))
def test_paths_through_objects_of_one_kind_are_those_that_lists_of_them_show(seed: int) -> None:
    """Whether only objects of a kind are between an object and the end of each path."""
    tree, keys = made_tree(seed)
    found = Paths(tree, [tree.last(key) for key in keys])
    head = found.first[0].value

    def leads_through(path: list[Reference]) -> bool:
        numbers = [n for n, step in enumerate(path) if step.value is head]
        inner = path[numbers[0] + 1 : -1] if numbers else []
        return bool(numbers) and all(type(step.value) is Node for step in inner)

    expected = all(leads_through(tree.path(key)) for key in keys)
    assert found.all_lead_through(head, lambda kind: kind is Node) is expected


def test_an_object_to_which_a_reference_is_missing_is_left_out() -> None:
    """Another thread may have removed a reference during the search."""
    first, second, third = Thing(), Thing(), Thing()
    references = {
        id(first): Reference(first, None, Root("net.", "", {}), "x"),
        id(second): Reference(second, first),
        id(third): Reference(third, Thing()),
    }
    assert without_broken(references, {1: second, 2: third, 3: first}) == {1: second, 3: first}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield


def attributes(tensors: list[torch.Tensor]) -> Thing:
    """Return an object with an attribute for each tensor."""
    found = Thing()
    for number, tensor in enumerate(tensors):
        setattr(found, f"batch_{number}", tensor)
    return found


def linked(tensors: list[torch.Tensor]) -> Any:
    """Return a linked list of tuples."""
    found: Any = None
    for tensor in tensors:
        found = (tensor, found)
    return found


def chained(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the product of all tensors, whose graph saves each."""
    weight = torch.nn.Parameter(torch.ones(2))
    total = weight.sum()
    for tensor in tensors:
        total = total + (weight * tensor).sum()
    return total


def closures(tensors: list[torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    """Return a function for each tensor, which returns it."""
    return [lambda tensor=tensor: tensor for tensor in tensors]


@pytest.mark.parametrize(
    "kept",
    [
        list,
        tuple,
        set,
        frozenset,
        lambda tensors: dict(enumerate(tensors)),
        lambda tensors: dict.fromkeys(tensors, 1),
        lambda tensors: [[tensor] for tensor in tensors],
        attributes,
        linked,
        closures,
        chained,
    ],
    ids=["list", "tuple", "set", "frozenset", "dict", "keys", "nested", "attributes", "linked",
         "closures", "chain"],
)  # fmt: skip
def test_what_one_container_holds_is_one_group(kept: Callable[[list[torch.Tensor]], Any]) -> None:
    """However a container is built, what it holds of one line is one group with all bytes."""
    with MemoryProbe("cpu").measure() as region:
        KEEP.append(kept([torch.ones(2) for _ in range(TENSORS)]))
    largest = region.retained[0]
    assert (largest.count, largest.bytes) == (TENSORS, 8 * TENSORS)
    assert str(largest.held_by).startswith(("planted.KEEP[0]", "list(planted.KEEP[0])"))


def test_parameters_of_a_module_are_groups_of_their_own() -> None:
    """The names of parameters, buffers and modules are attributes, and no keys of a dict."""
    with MemoryProbe("cpu").measure() as region:
        KEEP.append(torch.nn.BatchNorm1d(8))
    held = {str(holding.held_by).rpartition(".")[2] for holding in region.retained}
    assert held == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
