"""The search for live storages runs no operators."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cka_memory.meters.objects import live_storages


class Recorder(TorchDispatchMode):
    """A mode that records every operator it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stale_view() -> Iterator[torch.Tensor]:
    """A view whose ``grad_fn`` is recomputed with operators when it is accessed."""
    with _force_original_view_tracking(True):  # compilers set this
        base = torch.ones(4, requires_grad=True) * 1
        view = base[1:]
        base.mul_(2)
        yield view


def test_search_for_live_storages_runs_no_operator(stale_view: torch.Tensor) -> None:
    """The search runs no operator, because a mode that is compiling
    fails on unexpected operators.
    """
    with Recorder() as recorder:
        found = {storage._cdata for storage in live_storages(torch.device("cpu"))}
    assert stale_view.untyped_storage()._cdata in found
    assert recorder.seen == []


def test_stale_view_runs_operators_when_it_is_accessed(stale_view: torch.Tensor) -> None:
    """Accessing the stale view runs operators, so a search that accessed it would be noticed."""
    with Recorder() as recorder:
        assert not stale_view.is_leaf
    assert recorder.seen != []
