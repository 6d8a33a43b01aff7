"""Public names: they exist, are documented, and include those that the contract lists."""

import inspect

import pytest

import pytest_cka_memory
from pytest_cka_memory import MemoryProbe, Region, RegionRecord, errors
from pytest_cka_memory.core.figure_rows import Figure
from pytest_cka_memory.core.figures import FIGURES, READABLE
from pytest_cka_memory.core.record_parts import FigureNames
from pytest_cka_memory.meters import Meter

CONTRACT = (
    "MemoryProbe",
    "Snapshot",
    "measure_memory_at_batch_counts",
    "measure_memory_retention",
)
FIGURES_OF_THE_CONTRACT = (
    "start_bytes",
    "end_bytes",
    "peak_bytes",
    "peak_increase_bytes",
    "retained_bytes",
    "net_bytes",
    "reserved_start_bytes",
    "reserved_peak_bytes",
    "reserved_end_bytes",
    "one_time_bytes",
    "batches",
    "timeline",
    "growth_bytes_per_batch",
)


@pytest.mark.parametrize("name", pytest_cka_memory.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    """Each name in ``__all__`` exists and is documented."""
    public = getattr(pytest_cka_memory, name)
    if name != "__version__":
        assert inspect.getdoc(public)


def test_dir_lists_every_public_name() -> None:
    """``dir()`` lists every public name, also those that are imported only when they are used."""
    assert set(pytest_cka_memory.__all__) <= set(dir(pytest_cka_memory))


def test_the_public_names_include_those_of_the_contract() -> None:
    """The public names include those of the contract, and none is listed twice."""
    names = pytest_cka_memory.__all__
    assert len(names) == len(set(names))
    assert set(CONTRACT) <= set(names)
    assert set(FIGURES_OF_THE_CONTRACT) <= set(READABLE)


def test_type_checkers_see_every_figure_of_a_region() -> None:
    """A region's figures are declared with the type of their row,
    so that type checkers see them.
    """
    expected = {"completed": bool, "garbage_left": bool, "garbage_freed": bool}
    for row in FIGURES.values():
        if row.name != "batches":  # a method of a region
            types = (float if "per_batch" in row.name else int, float)
            for name, type_ in zip((row.name, row.mb_name), types, strict=True):
                expected[name] = type_ | None if row.optional else type_
    assert FigureNames.__annotations__ == expected


@pytest.mark.parametrize(
    "owner", [MemoryProbe, Region, RegionRecord, Meter], ids=lambda owner: owner.__name__
)
def test_every_public_method_is_documented(owner: type) -> None:
    """``help()`` shows a sentence for each public method."""
    undocumented = [
        name
        for name, member in vars(owner).items()
        if not name.startswith("_")
        and (callable(member) or isinstance(member, property))
        and not inspect.getdoc(member)
    ]
    assert undocumented == []


def test_every_error_derives_from_cka_memory_error() -> None:
    """``except CkaMemoryError`` catches every error of the package."""
    found = [error for _, error in inspect.getmembers(errors, inspect.isclass)]
    assert len(found) >= 6
    assert all(issubclass(error, errors.CkaMemoryError) for error in found)


@pytest.mark.parametrize("figure", FIGURES_OF_THE_CONTRACT)
def test_a_region_has_every_figure_in_bytes_and_in_megabytes(figure: str) -> None:
    """A region has every figure in bytes and in MB, such as ``peak_bytes`` and ``peak_mb``."""
    from pytest_cka_memory.testing import ScriptedMeter

    with MemoryProbe(meter=ScriptedMeter()).measure() as region:
        pass
    assert hasattr(region, figure)
    assert hasattr(region, figure.replace("_bytes", "_mb"))


@pytest.mark.parametrize("figure", FIGURES.values(), ids=lambda figure: figure.name)
def test_dir_lists_every_figure_of_the_registry(figure: Figure) -> None:
    """Interactive sessions complete ``region.`` from ``dir``, which has each figure, also while
    open.
    """
    from pytest_cka_memory.testing import ScriptedMeter

    with MemoryProbe(meter=ScriptedMeter()).measure() as region:
        assert {figure.name, figure.mb_name} <= set(dir(region))
    if figure.name != "batches":  # of a region, the method that samples a loader
        assert getattr(region, figure.name) == getattr(region.record, figure.name)
