"""What faulty tests share: two ordinary tests follow each; ``test_faults.py`` runs all of them.

The first ordinary test keeps 100 bytes and the second keeps nothing. They must get these figures
after any fault.
"""

from collections.abc import Iterator

import pytest
import torch

KEPT: list[object] = []
LONGEST_WAIT_SECONDS = 60


def keep(bytes_: int = 100) -> None:
    KEPT.append(torch.zeros(bytes_, dtype=torch.uint8))


@pytest.fixture(autouse=True)
def _clear_kept() -> Iterator[None]:
    yield
    KEPT.clear()


class Fault:
    """Base class that adds the two ordinary tests at the end of a class."""

    def __init_subclass__(cls) -> None:
        cls.test_keeps_after = _keeps  # type: ignore[attr-defined]
        cls.test_frees_after = _frees  # type: ignore[attr-defined]


def _keeps(self: Fault) -> None:
    keep(100)


@pytest.mark.zero_retention
def _frees(self: Fault) -> None:
    torch.zeros(40, dtype=torch.uint8)
