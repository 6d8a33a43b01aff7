"""Limits on how high a figure may be, with what each says of the figure when it is broken."""

from dataclasses import dataclass

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.garbage import part_of_message
from pytest_cka_memory.core.process_limits import whose
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.units import format_exact, format_with_unit


@dataclass(frozen=True)
class Maximum(Limit):
    """A figure of the record may be at most ``allowed_bytes``."""

    figure: str
    """Its name in the record: ``retained_bytes``."""
    allowed_bytes: int

    @property
    def addition(self) -> str:
        return FIGURES[self.figure].measured_by

    @property
    def judges_device(self) -> bool:
        return FIGURES[self.figure].of_device

    def judge(self, record: RegionRecord) -> Verdict:
        """Return None, a breach, or why the device cannot be judged."""
        measured = getattr(record, self.figure)
        if measured is None:
            return Unjudged(self.text, FIGURES[self.figure].unknown_because)
        if measured <= self.allowed_bytes:
            return None
        message = (
            f"{FIGURES[self.figure].noun} {format_exact(measured)}, "
            f"allowed {format_exact(self.allowed_bytes)}: "
            f"{format_exact(measured - self.allowed_bytes)} too much{self._parts(record)}"
            f"{part_of_message(record, self.figure)}"
        )
        return Breach(self.text, self.allowed_bytes, measured, message, self.figure)

    def _parts(self, record: RegionRecord) -> str:
        """Return what the figure consists of, as the end of a sentence."""
        return ""


@dataclass(frozen=True)
class MaximumLevel(Maximum):
    """The peak may be at most ``allowed_bytes``, with what was live before the region."""

    def _parts(self, record: RegionRecord) -> str:
        return (
            f"; it was {format_exact(record.start_bytes)} at the start of the region, which added "
            f"{format_exact(record.peak_increase_bytes)}"
        )


@dataclass(frozen=True)
class MaximumInCycles(Maximum):
    """At most ``allowed_bytes`` may be left to the garbage collector."""

    def _parts(self, record: RegionRecord) -> str:
        return "; it stays allocated until the garbage collector runs"


@dataclass(frozen=True)
class MaximumOfProcess(Maximum):
    """The memory of the process and its children may rise by at most ``allowed_bytes``."""

    def _parts(self, record: RegionRecord) -> str:
        return whose(record)


@dataclass(frozen=True)
class MaximumOutside(Maximum):
    """Memory of the card outside torch's allocator may rise by at most ``allowed_bytes``."""

    def _parts(self, record: RegionRecord) -> str:
        start_bytes, peak_bytes = record.outside_start_bytes, record.outside_peak_bytes
        if start_bytes is None or peak_bytes is None:
            return ""
        return (
            f"; it was {format_with_unit(start_bytes)} at entry and {format_with_unit(peak_bytes)} "
            "at its highest, and torch's reserve rose by "
            f"{format_with_unit(record.reserved_increase_bytes or 0)} at most"
        )
