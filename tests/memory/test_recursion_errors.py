"""Tensors that are freed while the stack is exhausted are counted as freed."""

from collections.abc import Callable

import pytest
import torch

from pytest_cka_memory import MemoryProbe

EXISTING = torch.ones(25)


@pytest.fixture(autouse=True, scope="module")
def _existing(imports_excluded_from_search: None) -> None:
    global EXISTING
    EXISTING = torch.ones(25)


@pytest.mark.parametrize("more", range(8))
@pytest.mark.parametrize(
    ("computes", "inside"),
    [
        pytest.param(lambda: torch.zeros(25), 0, id="new-tensor"),
        pytest.param(lambda: EXISTING.add(1), 8 + 4, id="result"),  # 1 as int64 and as float32
    ],
)
def test_a_recursion_error_retains_nothing(
    cpu: MemoryProbe, is_native: bool, computes: Callable[[], object], inside: int, more: int
) -> None:
    """At whatever depth the stack ends in the counting code, a recursion error retains nothing."""

    def deeper() -> None:
        computes()
        deeper()

    def below(frames: int) -> None:
        below(frames - 1) if frames else deeper()

    with cpu.measure() as region, pytest.raises(RecursionError):
        below(more)
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
    assert region.peak_increase_bytes == 100 + (inside if is_native else 0)
