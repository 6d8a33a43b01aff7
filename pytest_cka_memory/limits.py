"""What a region may use: markers become limits, limits judge records. Plain values, no pytest."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.growth import MIN_JUDGED_BATCHES, full_batches, growth_bytes_per_batch
from pytest_cka_memory.core.markers import example_of
from pytest_cka_memory.errors import LimitError, SizeError
from pytest_cka_memory.units import MB, format_exact, format_fraction, megabytes


@dataclass(frozen=True)
class Breach:
    """A limit that a region broke, or that could not be judged and so was not kept."""

    limit: str
    """As a user writes it: ``max_retained_mb(1)``."""
    allowed_bytes: int
    """The most it allows; per batch for a growth limit."""
    measured_bytes: float | None
    """What was measured; None where the limit could not be judged."""
    message: str
    """One sentence: measured, allowed, by how much."""
    figure: str
    """The figure of the record that broke it."""

    def to_dict(self) -> dict[str, Any]:
        """Builtin types only."""
        return asdict(self)


@dataclass(frozen=True)
class Unjudged:
    """A limit that says nothing on this device; reported, never silently kept."""

    limit: str
    reason: str


Verdict = Breach | Unjudged | None


@dataclass(frozen=True)
class Limit(ABC):
    """One limit on a region."""

    text: str
    """As a user writes it: ``max_retained_mb(1)``."""

    @abstractmethod
    def judge(self, record: RegionRecord) -> Verdict:
        """Return None where `record` keeps this limit; a value equal to the limit keeps it."""

    def verdicts(self, record: RegionRecord) -> Sequence[Verdict]:
        """As :meth:`judge`, for a limit on several figures."""
        return [self.judge(record)]


@dataclass(frozen=True)
class Maximum(Limit):
    """A figure of the record may be at most ``allowed_bytes``."""

    noun: str
    """What the figure is called in messages."""
    figure: str
    """Its name in the record."""
    allowed_bytes: int

    def judge(self, record: RegionRecord) -> Verdict:
        measured = getattr(record, self.figure)
        if measured is None:
            return Unjudged(self.text, "this device has no reserve")
        if measured <= self.allowed_bytes:
            return None
        message = (
            f"{self.noun} {format_exact(measured)}, allowed {format_exact(self.allowed_bytes)}: "
            f"{format_exact(measured - self.allowed_bytes)} too much"
        )
        return Breach(self.text, self.allowed_bytes, measured, message, self.figure)


_GROWTH = "growth_bytes_per_batch"


@dataclass(frozen=True)
class FlatPerBatch(Limit):
    """Live memory may grow by at most ``tolerance_bytes`` a batch, after ``warmup`` batches."""

    tolerance_bytes: int
    warmup: int

    def judge(self, record: RegionRecord) -> Verdict:
        growth = growth_bytes_per_batch(record.timeline, self.warmup)
        if growth is None:
            return Breach(self.text, self.tolerance_bytes, None, self._missing(record), _GROWTH)
        if growth <= self.tolerance_bytes:
            return None
        message = (
            f"grew by {format_fraction(growth)} bytes a batch over {record.batches} batches, "
            f"allowed {format_exact(self.tolerance_bytes)} a batch"
        )
        return Breach(self.text, self.tolerance_bytes, growth, message, _GROWTH)

    def _missing(self, record: RegionRecord) -> str:
        if not record.timeline:
            return (
                "cannot be judged, no batch was seen: loop over region.batches(loader), "
                "or call region.batch_done() after each batch"
            )
        needed, seen = self.warmup + MIN_JUDGED_BATCHES, len(full_batches(record.timeline))
        return (
            f"cannot be judged, {seen} full batches were seen and {needed} are needed "
            f"({self.warmup} to warm up, {MIN_JUDGED_BATCHES} to judge): "
            f"feed {needed - seen} more of the same size"
        )


def max_retained_mb(limit: object) -> Maximum:
    """At most `limit` MB, or e.g. ``'512 KiB'``, born in the region and alive at its end."""
    text = f"max_retained_mb({limit!r})"
    return Maximum(text, "retained", "retained_bytes", megabytes(limit))


def zero_retention() -> Maximum:
    """Nothing born in the region may be alive at its end."""
    return Maximum("zero_retention", "retained", "retained_bytes", 0)


def max_peak_mb(limit: object) -> Maximum:
    """The peak may rise at most `limit` MB above the level at entry."""
    text = f"max_peak_mb({limit!r})"
    return Maximum(text, "peak increase", "peak_increase_bytes", megabytes(limit))


def max_reserved_mb(limit: object) -> Maximum:
    """The allocator's reserve may rise at most `limit` MB above its level at entry."""
    text = f"max_reserved_mb({limit!r})"
    return Maximum(text, "reserve increase", "reserved_increase_bytes", megabytes(limit))


def flat_per_batch(tolerance_mb: object = 0.0, warmup: object = 1) -> FlatPerBatch:
    """Live memory may grow at most `tolerance_mb` MB a batch after `warmup` batches."""
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise LimitError(f"warmup={warmup!r}: write a whole number of batches, 0 or more")
    tolerance_bytes = megabytes(tolerance_mb)
    arguments = [f"tolerance_mb={tolerance_mb!r}"] if tolerance_bytes else []
    arguments += [f"warmup={warmup}"] if warmup != 1 else []
    written = f"({', '.join(arguments)})" if arguments else ""
    return FlatPerBatch(f"flat_per_batch{written}", tolerance_bytes, warmup)


_BUILDERS = (max_retained_mb, zero_retention, max_peak_mb, max_reserved_mb, flat_per_batch)
MARKERS: Mapping[str, tuple[Callable[..., Limit], str]] = {
    build.__name__: (build, example_of(build.__name__)) for build in _BUILDERS
}
"""Marker name -> (what builds its limit, an example of it)."""


def limit_from_marker(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Limit:
    """Build the limit a marker asks for.

    Raises:
        LimitError: for arguments the marker cannot have, with an example of what to write.
    """
    build, example = MARKERS[name]
    written = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
    try:
        return build(*args, **kwargs)
    except (SizeError, LimitError) as error:
        raise LimitError(f"{name}({written}): {error}") from None
    except TypeError:
        hint = f"wrong arguments; write e.g. @pytest.mark.{example}"
        raise LimitError(f"{name}({written}): {hint}") from None


def default_limits(
    own: Sequence[Limit], max_retained_bytes: int | None, max_peak_bytes: int | None
) -> list[Limit]:
    """Limits of the whole session for a test that has none `own` on the same figure."""
    offered = (
        ("--cka-memory-max-retained-mb", max_retained_mb(0), max_retained_bytes),
        ("--cka-memory-max-peak-mb", max_peak_mb(0), max_peak_bytes),
    )
    limited = {limit.figure for limit in own if isinstance(limit, Maximum)}
    return [
        replace(limit, text=f"{option}={size / MB:g}", allowed_bytes=size)
        for option, limit, size in offered
        if size is not None and limit.figure not in limited
    ]
