"""What dies where the stack ends, with no room left to tell it, is dead in the books too."""

from collections.abc import Callable

import pytest
import torch

from pytest_cka_memory import MemoryProbe

LIVING = torch.ones(25)


@pytest.mark.parametrize("more", range(8))
@pytest.mark.parametrize(
    "computes",
    [
        pytest.param(lambda: torch.zeros(25), id="birth"),
        pytest.param(lambda: LIVING.add(1), id="result"),
    ],
)
def test_a_recursion_too_deep_leaves_no_bytes(computes: Callable[[], object], more: int) -> None:
    """Wherever in the books the stack has come to its end: the depth decides."""

    def deeper() -> None:
        computes()
        deeper()

    def below(frames: int) -> None:
        below(frames - 1) if frames else deeper()

    with MemoryProbe("cpu").measure() as region, pytest.raises(RecursionError):
        below(more)
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
    assert region.peak_increase_bytes == 100
