"""The figures of one region: plain data that crosses processes and disk."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pytest_cka_memory.core.growth import Sample, growth_bytes_per_batch
from pytest_cka_memory.units import MB


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Storages of one origin and one kind of holder."""

    bytes: int
    """Of all of them."""
    count: int
    dtype: str | None = None
    """Of the largest, as its tensor was born; None, as the next two, where no operator made it."""
    shape: tuple[int, ...] | None = None
    operator: str | None = None
    created_at: tuple[str, ...] = ()
    """Frames of the code that made them, innermost first: ``net.py:11 in Block.forward``."""
    held_by: str | None = None
    """A path to the largest, as code; None where no Python object holds it."""
    hint: str | None = None
    """What usually helps with such a holder."""
    batches: int | None = None
    """In how many batches one was born; None outside a batch loop."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Holding":
        """Rebuild from a dict, where tuples may have become lists."""
        plain: dict[str, Any] = dict(data)
        for name in ("shape", "created_at"):
            if plain.get(name) is not None:
                plain[name] = tuple(plain[name])
        return cls(**plain)


@dataclass(frozen=True, kw_only=True)
class RegionRecord:
    """What was measured between a region's entry and its exit; bytes, unless said."""

    label: str
    """As the user named it; empty for a whole test."""
    completed: bool
    """False where an exception left the region; its traceback holds tensors, so do not judge."""
    start_bytes: int
    """Live at entry, after cleaning."""
    end_bytes: int
    """Live at exit, after cleaning."""
    peak_bytes: int
    """Highest live level inside, what was there before included."""
    retained_bytes: int
    """Born inside and alive at exit."""
    reserved_start_bytes: int | None = None
    """The allocator's reserve at entry; None, as the next two, where the device has none."""
    reserved_peak_bytes: int | None = None
    """Its highest level inside."""
    reserved_end_bytes: int | None = None
    """At exit, after cleaning."""
    one_time_bytes: int | None = None
    """Allocated by a first run only, such as library workspaces; None where not determined."""
    timeline: tuple[Sample, ...] = ()
    """One sample per batch boundary."""
    retained: tuple[Holding, ...] = ()
    """What ``retained_bytes`` counts and who holds it; searched for where a limit broke."""
    grown: tuple[Holding, ...] = ()
    """What is born and kept batch after batch; searched for where a growth limit broke."""
    at_peak: tuple[Holding, ...] = ()
    """What was alive at the peak, by origin; listed where a peak limit broke."""

    @property
    def peak_increase_bytes(self) -> int:
        """Peak above the level at entry."""
        return self.peak_bytes - self.start_bytes

    @property
    def net_bytes(self) -> int:
        """Level at exit less that at entry; negative where old tensors were freed."""
        return self.end_bytes - self.start_bytes

    @property
    def reserved_increase_bytes(self) -> int | None:
        """Peak of the reserve above its level at entry."""
        if self.reserved_peak_bytes is None or self.reserved_start_bytes is None:
            return None
        return self.reserved_peak_bytes - self.reserved_start_bytes

    @property
    def batches(self) -> int:
        """Batch boundaries seen."""
        return len(self.timeline)

    @property
    def growth_bytes_per_batch(self) -> float | None:
        """Growth per batch after one batch of warm-up; see :mod:`pytest_cka_memory.core.growth`."""
        return growth_bytes_per_batch(self.timeline)

    def in_mb(self, figure: str) -> float | None:
        """A figure in MB: ``in_mb("peak_bytes")``."""
        size = getattr(self, figure)
        return None if size is None else size / MB

    def to_dict(self) -> dict[str, Any]:
        """Every figure as builtin types, the derived ones included, in a fixed order."""
        # Not asdict of it all, which would take a second for 100,000 samples.
        plain = dict(vars(self))
        timeline = [dict(vars(sample)) for sample in plain.pop("timeline")]
        for name in ("retained", "grown", "at_peak"):
            plain[name] = [asdict(holding) for holding in plain[name]]
        derived = {name: getattr(self, name) for name in DERIVED_FIGURES}
        return {**plain, **derived, "timeline": timeline}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RegionRecord":
        """Rebuild a record from :meth:`to_dict`; figures it does not know are ignored."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        known["timeline"] = tuple(Sample(**sample) for sample in data.get("timeline", ()))
        for name in ("retained", "grown", "at_peak"):
            known[name] = tuple(Holding.from_dict(holding) for holding in data.get(name, ()))
        return cls(**known)


DERIVED_FIGURES = (
    "peak_increase_bytes",
    "net_bytes",
    "reserved_increase_bytes",
    "batches",
    "growth_bytes_per_batch",
)
FIGURES = (*RegionRecord.__dataclass_fields__, *DERIVED_FIGURES)
NUMBERS = tuple(
    name for name in FIGURES if name.endswith(("_bytes", "_per_batch")) or name == "batches"
)
"""Those that are a number, or None where not determined."""
