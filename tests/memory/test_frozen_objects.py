"""Regions on the CPU while ``gc.freeze`` hides objects from the search for live tensors."""

import gc

import pytest
import torch

from pytest_cka_memory import MemoryProbe


@pytest.fixture(scope="module", autouse=True)
def _imports_excluded() -> None:
    """Freeze nothing for this module, in place of the folder's fixture; its tests freeze."""


def test_frozen_objects_are_not_counted(cpu: MemoryProbe) -> None:
    """``gc.freeze`` hides objects from the search; tensors that are new after it are counted."""
    old = torch.zeros(100)
    gc.collect()
    gc.freeze()
    try:
        with cpu.measure() as region:
            new = old + 1
            old.add_(1)
    finally:
        gc.unfreeze()
    assert region.retained_bytes == 400
    del new
