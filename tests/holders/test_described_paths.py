"""Paths of references as plain text: one link for each object, with how it is referenced."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from planted import KEEP, cleaned_up
from torch import nn

from pytest_cka_memory import Holding, MemoryProbe
from pytest_cka_memory.core.retention import Link

OTHER: dict[str, Any] = {}


class Explainer:
    """Explains no figure at the end of a region, so that tests read ``region.retained``."""

    def __init__(self, draws_paths: bool) -> None:
        self.draws_paths = draws_paths

    def figures_to_explain(self, record: Any) -> tuple[str, ...]:
        return ("retained_bytes",)

    def named_values(self) -> dict[str, Any]:
        return {}


class Cache:
    """An object with an attribute."""

    def __init__(self, x: torch.Tensor) -> None:
        self.items = [x]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield
    OTHER.clear()


def retained(keep: Any, *, draws_paths: bool = True) -> Holding:
    """Return the largest group that `keep` retains when it is given a tensor."""
    explainer = Explainer(draws_paths)
    with MemoryProbe("cpu", explainer=explainer).measure() as region:
        keep(torch.ones(250))
    return region.record.retained[0]


def test_path_has_a_link_for_each_object_that_users_know() -> None:
    """The dict of an object and the dicts of a module are part of the next reference."""

    def keep(x: torch.Tensor) -> None:
        net = nn.Sequential(nn.Identity())
        net[0].register_buffer("seen", x)
        KEEP.append(net)

    assert retained(keep).paths == (
        (
            Link("", "module planted"),
            Link("KEEP", "list"),
            Link("[0]", "Sequential"),
            Link("[0]", "Identity"),
            Link(".seen", "Tensor (250,)"),
        ),
    )


def test_two_holders_have_a_path_each() -> None:
    """If two references keep a tensor, each has a path that ends with the tensor."""

    def keep(x: torch.Tensor) -> None:
        KEEP.append(Cache(x))
        OTHER["last"] = x

    holding = retained(keep)
    paths = {tuple(link.reference for link in path) for path in holding.paths}
    assert paths == {("", "KEEP", "[0]", ".items", "[0]"), ("", "OTHER", "['last']")}
    assert {path[-1] for path in holding.paths} <= {
        Link("[0]", "Tensor (250,)"),
        Link("['last']", "Tensor (250,)"),
    }
    assert len(holding.also_held_by) == 1


@pytest.mark.native
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")  # once in each process
def test_loop_through_cpp_is_walked_around_once() -> None:
    """The path of a loop begins and ends with the same object."""

    def keep(x: torch.Tensor) -> None:
        weight = nn.Parameter(x)
        weight.pow(3).sum().backward(create_graph=True)

    (path,) = retained(keep).paths
    assert path[0].reference == ""
    assert f"the same {path[0].object}" in [link.object for link in path]
    assert {"Parameter (250,)", "PowBackward0"} <= {
        link.object.removeprefix("the same ") for link in path
    }


def test_long_path_loses_its_middle() -> None:
    """Of a chain of many objects the first and the last are kept, with the number of the others."""

    def keep(x: torch.Tensor) -> None:
        chain: Any = x
        for _ in range(30):
            chain = [chain]
        KEEP.append(chain)

    (path,) = retained(keep).paths
    assert len(path) == 13
    assert [link.object for link in path if "more" in link.object] == ["… 21 more …"]
    assert path[-1] == Link("[0]", "Tensor (250,)")


def test_nothing_is_described_without_the_request() -> None:
    """Without the option a group has no paths, and its plain data no such key."""
    assert retained(KEEP.append, draws_paths=False).paths == ()
