"""The limits of the markers: build them, and judge a record by them. Does not import pytest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from pytest_cka_memory.core.figures import FIGURES, RegionRecord
from pytest_cka_memory.core.growth import MIN_JUDGED_BATCHES, full_batches, growth_bytes_per_batch
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.core.marker_arguments import (
    SCOPES,
    call_text,
    only_warns,
    scope_of,
    with_argument,
)
from pytest_cka_memory.core.markers import MARKERS
from pytest_cka_memory.core.process_limits import FlatProcess, whose
from pytest_cka_memory.core.processes import WARMUP
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.errors import LimitError, SizeError
from pytest_cka_memory.units import MB, counted, format_exact, format_with_unit, megabytes

__all__ = [
    "Breach",
    "FlatPerBatch",
    "FlatProcess",
    "Limit",
    "Maximum",
    "MaximumLevel",
    "MaximumOfProcess",
    "MaximumOutside",
    "Unjudged",
    "Verdict",
    "default_limits",
    "flat_per_batch",
    "flat_process_per_batch",
    "limit_from_marker",
    "max_cycles_mb",
    "max_level_mb",
    "max_outside_mb",
    "max_peak_mb",
    "max_process_mb",
    "max_reserved_mb",
    "max_retained_mb",
    "no_cycles",
    "zero_retention",
]


@dataclass(frozen=True)
class Maximum(Limit):
    """A figure of the record may be at most ``allowed_bytes``."""

    figure: str
    """Its name in the record: ``retained_bytes``."""
    allowed_bytes: int

    @property
    def addition(self) -> str:
        return FIGURES[self.figure].measured_by

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


_GROWTH = "growth_bytes_per_batch"


@dataclass(frozen=True)
class FlatPerBatch(Limit):
    """Live memory may grow by at most ``tolerance_bytes`` per batch, after ``warmup`` batches."""

    tolerance_bytes: int
    warmup: int
    unit: str = "batch"
    """What is judged in its messages: a batch, or a repeated run of the test."""
    reports_host: ClassVar[bool] = True

    def verdicts(self, record: RegionRecord) -> Sequence[Verdict]:
        """Return the verdict, and what several batches have left on the host, which has none."""
        left = _left_on_host(record.host_retained)
        return [self.judge(record), Unjudged(f"{self.text} on the host", left) if left else None]

    def judge(self, record: RegionRecord) -> Verdict:
        """Return None or a breach; too few batches are a breach that says how many are missing."""
        growth = growth_bytes_per_batch(record.timeline, self.warmup)
        if growth is None:
            return Breach(self.text, self.tolerance_bytes, None, self._missing(record), _GROWTH)
        if growth <= self.tolerance_bytes:
            return None
        message = (
            f"grew by {format_exact(growth)} per {self.unit} over "
            f"{counted(record.batches, self.unit)}, allowed {format_exact(self.tolerance_bytes)} "
            f"per {self.unit}"
        )
        return Breach(self.text, self.tolerance_bytes, growth, message, _GROWTH)

    def _missing(self, record: RegionRecord) -> str:
        if not record.timeline:
            return (
                "cannot be judged because no batch was seen: loop over region.batches(loader), "
                "call region.batch_done() after each batch, or write 'with region.each_step():' "
                "around code that trains with an optimizer"
            )
        needed, seen = self.warmup + MIN_JUDGED_BATCHES, len(full_batches(record.timeline))
        return (
            f"cannot be judged because {counted(seen, 'full batch')} "
            f"{'was' if seen == 1 else 'were'} seen and {needed} are needed "
            f"({self.warmup} to warm up, {MIN_JUDGED_BATCHES} to judge): "
            f"add {needed - seen} more of the same size"
        )


def _left_on_host(groups: Sequence[Holding]) -> str:
    """Return what a line has left in several batches, as a sentence; empty if there is nothing.

    It describes the largest group, with all that the same expression has allocated: the first
    storages of a graph, for example, are held in another way than the others.
    """
    largest = next((group for group in groups if (group.batches or 0) > 1), None)
    if largest is None:
        return ""
    same = [group for group in groups if group.made_at == largest.made_at]
    count, size = sum(group.count for group in same), sum(group.bytes for group in same)
    made = f": made at {largest.made_at}" if largest.created_at else ""
    held = f", held by {largest.held_by}" if largest.held_by else ""
    advice = f"; what to do: {largest.hint}" if largest.hint else ""
    return (
        f"{counted(count, 'tensor')}, {format_exact(size)}, allocated in several batches, are "
        f"retained and not judged{made}{held}{advice}"
    )


def max_retained_mb(limit: object) -> Maximum:
    """Return a limit on what was allocated in the region and is live at its end.

    Args:
        limit: a number of MB (2**20 bytes), or a text such as ``'512 KiB'``.

    Raises:
        SizeError: if `limit` is not a valid size.
    """
    return Maximum(f"max_retained_mb({limit!r})", "retained_bytes", megabytes(limit))


def zero_retention() -> Maximum:
    """Return a limit of 0 bytes on what was allocated in the region and is live at its end."""
    return Maximum("zero_retention", "retained_bytes", 0)


def max_peak_mb(limit: object) -> Maximum:
    """Return a limit on the rise of the peak above the level at entry.

    Args:
        limit: a number of MB (2**20 bytes), or a text such as ``'512 KiB'``.

    Raises:
        SizeError: if `limit` is not a valid size.
    """
    return Maximum(f"max_peak_mb({limit!r})", "peak_increase_bytes", megabytes(limit))


def max_level_mb(limit: object) -> MaximumLevel:
    """Return a limit on the peak, with what was live before the region.

    Args:
        limit: a number of MB (2**20 bytes), or a text such as ``'512 KiB'``.

    Raises:
        SizeError: if `limit` is not a valid size.
    """
    return MaximumLevel(f"max_level_mb({limit!r})", "peak_bytes", megabytes(limit))


def max_reserved_mb(limit: object) -> Maximum:
    """Return a limit on the rise of the allocator's reserve above its level at entry.

    Args:
        limit: a number of MB (2**20 bytes), or a text such as ``'512 KiB'``.

    Raises:
        SizeError: if `limit` is not a valid size.
    """
    return Maximum(f"max_reserved_mb({limit!r})", "reserved_increase_bytes", megabytes(limit))


def no_cycles() -> Maximum:
    """Return a limit of 0 bytes on what only the garbage collector frees."""
    return Maximum("no_cycles", "cycle_bytes", 0)


def max_cycles_mb(limit: object) -> Maximum:
    """Return a limit on what was allocated in the region and only the garbage collector frees.

    Args:
        limit: a number of MB (2**20 bytes), or a text such as ``'512 KiB'``.

    Raises:
        SizeError: if `limit` is not a valid size.
    """
    return Maximum(f"max_cycles_mb({limit!r})", "cycle_bytes", megabytes(limit))


def flat_per_batch(tolerance_mb: object = 0.0, warmup: object = 1) -> FlatPerBatch:
    """Return a limit on the growth of live memory per batch.

    Args:
        tolerance_mb: growth that is allowed, in MB (2**20 bytes), or a text such as ``'4 KiB'``.
        warmup: batches at the start that are not judged.

    Raises:
        SizeError: if `tolerance_mb` is not a valid size.
        LimitError: if `warmup` is not a whole number of batches.
    """
    tolerance_bytes, given = _tolerance_and_text(tolerance_mb, warmup, 0, 1)
    assert isinstance(warmup, int), "checked"
    return FlatPerBatch(f"flat_per_batch{given}", tolerance_bytes, warmup)


def max_process_mb(limit: object) -> MaximumOfProcess:
    """Return a limit on the rise of the memory of the process and its children.

    Args:
        limit: a number of MB (2**20 bytes), or a text such as ``'512 MiB'``.

    Raises:
        SizeError: if `limit` is not a valid size.
        LimitError: if psutil is not installed.
    """
    _require_psutil()
    figure = "process_increase_bytes"
    return MaximumOfProcess(f"max_process_mb({limit!r})", figure, megabytes(limit))


def flat_process_per_batch(tolerance_mb: object = 1.0, warmup: object = WARMUP) -> FlatProcess:
    """Return a limit on the steady growth of the memory of the process and its children.

    Args:
        tolerance_mb: growth per batch that is allowed, in MB (2**20 bytes), or a text such as
            ``'64 KiB'``.
        warmup: batches at the start that are not judged.

    Raises:
        SizeError: if `tolerance_mb` is not a valid size.
        LimitError: if `warmup` is not a whole number of batches, or psutil is not installed.
    """
    _require_psutil()
    tolerance_bytes, given = _tolerance_and_text(tolerance_mb, warmup, MB, WARMUP)
    assert isinstance(warmup, int), "checked"
    return FlatProcess(f"flat_process_per_batch{given}", tolerance_bytes, warmup)


def max_outside_mb(limit: object) -> MaximumOutside:
    """Return a limit on the rise of the card's memory outside torch's allocator.

    Args:
        limit: a number of MB (2**20 bytes), or a text such as ``'512 MiB'``.

    Raises:
        SizeError: if `limit` is not a valid size.
    """
    figure = "outside_increase_bytes"
    return MaximumOutside(f"max_outside_mb({limit!r})", figure, megabytes(limit))


def _require_psutil() -> None:
    if find_spec("psutil") is None:
        raise LimitError("needs psutil: pip install 'pytest-cka-memory[process]'")


def _tolerance_and_text(
    tolerance_mb: object, warmup: object, default_bytes: int, default_warmup: int
) -> tuple[int, str]:
    """Return the bytes of a tolerance, and both arguments as a user writes them.

    Raises:
        SizeError: if `tolerance_mb` is not a valid size.
        LimitError: if `warmup` is not a whole number of batches.
    """
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise LimitError(f"warmup={warmup!r}: write a whole number of batches, 0 or more")
    tolerance_bytes = megabytes(tolerance_mb)
    is_default = tolerance_bytes == default_bytes
    arguments = [] if is_default else [f"tolerance_mb={tolerance_mb!r}"]
    arguments += [f"warmup={warmup}"] if warmup != default_warmup else []
    return tolerance_bytes, f"({', '.join(arguments)})" if arguments else ""


def limit_from_marker(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the builder of the marker `name` with the marker's arguments; return what it builds.

    Each marker also takes ``warn=True``: then the limit that is built only warns.

    Raises:
        LimitError: if the marker does not take these arguments; the message has an example.
    """
    marker = MARKERS[name]
    build = marker.build()
    given = call_text(name, args, kwargs)
    rest = {key: value for key, value in kwargs.items() if key not in ("warn", "scope")}
    try:
        built, warns, scope = build(*args, **rest), only_warns(kwargs), scope_of(kwargs)
        if warns and isinstance(built, Limit):
            built = replace(built, warns=True, text=with_argument(built.text, "warn=True"))
        if scope == SCOPES[0]:
            return built
        if not isinstance(built, Maximum):
            raise LimitError(f"{name} is judged for each region: leave out scope={scope!r}")
        text = with_argument(built.text, f"scope={scope!r}")
        return replace(built, scope=scope, text=text)
    except (SizeError, LimitError) as error:
        raise LimitError(f"{given}: {error}") from None
    except TypeError:
        hint = f"wrong arguments; write e.g. @pytest.mark.{marker.example}"
        raise LimitError(f"{given}: {hint}") from None


def default_limits(
    own: Sequence[Limit], max_retained_bytes: int | None, max_peak_bytes: int | None
) -> list[Limit]:
    """Return the limits of the session's options, except on figures that `own` limits already."""
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
