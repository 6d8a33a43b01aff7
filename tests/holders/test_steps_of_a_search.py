"""A search does as few steps as possible for each live tensor and each element of a long list."""

import sys

import pytest
import torch

from pytest_cka_memory.holders import expressions
from pytest_cka_memory.holders import references as torch_references

OBJECTS = 300


def slow_references(tensor):
    return list(torch_references._references_of_tensor(tensor))


def leaf():
    return torch.ones(3)


def with_gradient():
    tensor = torch.ones(3, requires_grad=True)
    tensor.sum().backward()
    return tensor


def without_requirement_but_with_gradient():
    tensor = torch.ones(3)
    tensor.grad = torch.ones(3)
    return tensor


def computed():
    return torch.ones(3, requires_grad=True) * 2


def retaining_its_gradient():
    tensor = computed()
    tensor.retain_grad()
    tensor.sum().backward()
    return tensor


def with_hook():
    tensor = torch.ones(3, requires_grad=True)
    tensor.register_hook(lambda gradient: gradient)
    return tensor


def with_later_hook():
    tensor = torch.ones(3, requires_grad=True)
    tensor.register_post_accumulate_grad_hook(lambda _: None)
    return tensor


def view():
    return torch.ones(3)[1:]


def sparse():
    return torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    "make",
    [
        leaf,
        with_gradient,
        without_requirement_but_with_gradient,
        computed,
        retaining_its_gradient,
        with_hook,
        with_later_hook,
        view,
        sparse,
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.nn.Buffer(torch.ones(2)),
    ],
)
def test_quick_look_at_a_tensor_finds_the_same_references(make):
    """What is left out for tensors that reference nothing is not left out for others."""
    tensor = make()
    quick = list(torch_references._plain_references()(tensor))
    slow = slow_references(tensor)
    assert [text for text, _ in quick] == [text for text, _ in slow]
    assert all(one is other for (_, one), (_, other) in zip(quick, slow, strict=True))


def test_tensors_that_reference_nothing_are_not_looked_at_again(monkeypatch):
    """The slow look is for the few tensors that reference something."""
    slow = []
    references = torch_references._references_of_tensor
    monkeypatch.setattr(
        torch_references,
        "_references_of_tensor",
        lambda tensor: slow.append(tensor) or references(tensor),
    )
    rules = torch_references.tensor_rules()(torch.Tensor)
    for tensor in [torch.ones(2) for _ in range(OBJECTS)]:
        assert list(rules.extra_references(tensor)) == []
    assert slow == []
    assert [text for text, _ in rules.extra_references(computed())] == [".grad_fn"]
    assert len(slow) == 1


def test_a_long_list_is_looked_through_once_for_all_its_elements():
    """To describe n tensors in one list takes n steps, and not n times n."""
    values = [object() for _ in range(OBJECTS)]
    values.append(values[5])
    passes = []

    def places(value):
        def entries():
            passes.append(value)
            return enumerate(values)

        return list(expressions._places(values, "items", len(values), entries, value))

    before = sys.getrefcount(values[0])
    with expressions.remembering_places():
        found = [places(value) for value in values]
        missing = places(object())
        after = sys.getrefcount(values[0]) - passes.count(values[0])
    assert len(passes) == 1
    assert found[:3] == [[0], [1], [2]]
    assert found[5] == found[-1] == [5]
    assert missing == []
    assert after == before  # references are counted meanwhile, so it must add none
    assert places(values[5]) == [5, OBJECTS]
    assert len(passes) == 2
