"""To look for tensors is to ask each of them; no question may run a user's code or operators."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cka_memory.meters.ledger.live_objects import live_storages


class Recorder(TorchDispatchMode):
    """Notes every operator that reaches a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stale_view() -> Iterator[torch.Tensor]:
    """A view whose place in the graph is computed anew, with operators, when it is asked for."""
    with _force_original_view_tracking(True):  # as compilers do
        base = torch.ones(4, requires_grad=True) * 1
        view = base[1:]
        base.mul_(2)
        yield view


def test_looking_for_storages_shows_no_operator_to_a_mode(stale_view: torch.Tensor) -> None:
    """A mode in the midst of compiling fails on operators that nobody has called."""
    with Recorder() as recorder:
        found = {storage._cdata for storage in live_storages(torch.device("cpu"))}
    assert stale_view.untyped_storage()._cdata in found
    assert recorder.seen == []


def test_the_fixture_would_show_one(stale_view: torch.Tensor) -> None:
    """Else the test above could not fail."""
    with Recorder() as recorder:
        assert not stale_view.is_leaf
    assert recorder.seen != []
