"""Whichever function makes a tensor, the line that calls it is named, and what holds the tensor."""

import importlib.util
import inspect
import linecache
from collections.abc import Iterator
from pathlib import Path

import pytest
from makers import MAKERS, NET, Maker
from planted import KEEP, cleaned_up

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.storage_meter import StorageMeter

NATIVE = [pytest.param(maker, marks=pytest.mark.native, id=maker.make.__name__) for maker in MAKERS]
BY_STORAGES = [
    pytest.param(maker, id=maker.make.__name__) for maker in MAKERS if maker.known_to_storages
]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield
    NET.zero_grad()


def check(maker: Maker, probe: MemoryProbe, folder: Path) -> None:
    if maker.call == "load_file(" and importlib.util.find_spec("safetensors") is None:
        pytest.skip("safetensors is not installed; to run this test, run pip install safetensors")
    with probe.measure() as region:
        KEEP.append(maker.make(folder))
    assert region.retained
    for holding in region.retained:
        assert holding.created_at, holding
        file, _, line = holding.created_at[0].partition(" in ")[0].rpartition(":")
        assert file.endswith("makers.py")
        assert maker.call in linecache.getline(inspect.getfile(maker.make), int(line))
        if "debug information of the file" not in str(holding.hint):  # only C++ has that
            assert str(holding.held_by).startswith("planted.KEEP[0]")
    assert (region.retained[0].dtype, region.retained[0].shape) != ("uint8", (1000,))


@pytest.mark.slow
@pytest.mark.parametrize("maker", NATIVE)
def test_every_maker_is_named_by_its_line(maker: Maker, tmp_path: Path) -> None:
    """All storages that a call makes have its line, and an expression that leads to them."""
    check(maker, MemoryProbe("cpu"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("maker", BY_STORAGES)
def test_makers_are_named_where_storages_are_counted_from_python(
    maker: Maker, tmp_path: Path
) -> None:
    """The same without the library, except for memory that reaches no operator of torch."""
    check(maker, MemoryProbe(meter=StorageMeter()), tmp_path)
