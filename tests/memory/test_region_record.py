"""RegionRecord: derived figures, and conversion to JSON and back."""

import json
from collections.abc import Callable

import pytest

from pytest_cka_memory import Holding, RegionRecord, Sample
from pytest_cka_memory.core.figure_rows import AdditionalFigures
from pytest_cka_memory.core.figures import DERIVED, READABLE
from pytest_cka_memory.core.record_parts import ReserveFigures
from pytest_cka_memory.units import MB

FULL = RegionRecord(
    label="compare",
    completed=False,
    start_bytes=100,
    end_bytes=90,
    peak_bytes=1000,
    retained_bytes=5,
    reserved_start_bytes=2 * MB,
    reserved_peak_bytes=20 * MB,
    reserved_end_bytes=4 * MB,
    one_time_bytes=7,
    host_retained_bytes=3,
    host_retained=(Holding(bytes=3, count=1, held_by="net.outputs[0]"),),
    retained=(
        Holding(
            bytes=5,
            count=1,
            dtype="uint8",
            shape=(5,),
            operator="aten.zeros.default",
            created_at=("net.py:11 in Block.forward",),
            held_by="net.cache[0]",
        ),
        Holding(bytes=1, count=1),
    ),
    timeline=tuple(Sample(i, None, 100 + 4 * i, 10 + 4 * i, 900) for i in range(1, 10)),
)


def test_derived_figures_follow_from_the_measured_ones() -> None:
    """Increase and net are relative to the level at entry; net may be negative."""
    assert FULL.peak_increase_bytes == 900
    assert FULL.net_bytes == -10
    assert FULL.reserved_increase_bytes == 18 * MB
    assert FULL.batches == 9
    assert FULL.growth_bytes_per_batch == 4.0


def test_reserved_increase_is_none_without_a_reserve(record: Callable[..., RegionRecord]) -> None:
    """Without a reserve its increase is None instead of 0, because no limit can be judged."""
    plain = record()
    assert plain.reserved_increase_bytes is None
    assert plain.one_time_bytes is None
    assert plain.growth_bytes_per_batch is None
    assert plain.batches == 0


def test_one_megabyte_is_2_to_the_20_bytes(record: Callable[..., RegionRecord]) -> None:
    """One megabyte is 2**20 bytes, and a figure that is None in bytes is None in MB."""
    made = record(retained_bytes=3 * MB // 2)
    assert made.in_mb("retained_bytes") == 1.5
    assert made.in_mb("reserved_peak_bytes") is None


@pytest.mark.parametrize(
    "made", [FULL, RegionRecord.from_dict(FULL.to_dict())], ids=["new", "read"]
)
def test_a_record_survives_json(made: RegionRecord) -> None:
    """A record is equal after it was written as JSON, as reports
    and workers' messages contain it.
    """
    assert RegionRecord.from_dict(json.loads(json.dumps(made.to_dict()))) == FULL


def test_a_record_is_converted_to_builtin_types_only() -> None:
    """A record is converted to builtin types, because others would crash an xdist worker."""

    def kinds(value: object) -> set[type]:
        if isinstance(value, dict):
            return {dict}.union(*map(kinds, value.values()))
        if isinstance(value, (list, tuple)):
            return {type(value)}.union(*map(kinds, value))
        return {type(value)}

    assert kinds(FULL.to_dict()) == {dict, list, tuple, str, bool, int, float, type(None)}


def test_the_dictionary_has_every_figure_in_a_fixed_order() -> None:
    """Figures have a fixed order, so that a diff of two reports shows changes only."""
    bases = ReserveFigures, AdditionalFigures
    additional = [name for base in bases for name in base.__dataclass_fields__]
    names = [name for name in RegionRecord.__dataclass_fields__ if name != "timeline"]
    measured = [*(name for name in names if name not in additional), *additional]
    assert list(FULL.to_dict()) == [*measured, *(row.name for row in DERIVED), "timeline"]
    assert set(FULL.to_dict()) == set(READABLE)


def test_unknown_figures_are_ignored_and_missing_ones_get_defaults() -> None:
    """Unknown figures are ignored and missing ones get defaults, to
    read reports of other versions.
    """
    later = {**FULL.to_dict(), "invented_bytes": 1}
    assert RegionRecord.from_dict(later) == FULL
    earlier = FULL.to_dict()
    del earlier["one_time_bytes"], earlier["timeline"]
    read = RegionRecord.from_dict(earlier)
    assert (read.one_time_bytes, read.timeline) == (None, ())


def test_records_cannot_be_changed() -> None:
    """A record cannot be changed: assigning to a field raises AttributeError."""
    with pytest.raises(AttributeError, match="cannot assign to field 'peak_bytes'"):
        FULL.peak_bytes = 0  # type: ignore[misc]
