"""Build the limits of the markers from their arguments. Does not import pytest."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from emulated_cuda.cards import CARDS, CONTEXT_BYTES
from pytest_cka_memory.core.card_limits import CardMemory, FitsCards
from pytest_cka_memory.core.growth_limits import FlatPerBatch
from pytest_cka_memory.core.marker_arguments import (
    SCOPES,
    call_text,
    only_warns,
    scope_of,
    with_argument,
)
from pytest_cka_memory.core.markers import MARKERS
from pytest_cka_memory.core.maximum_limits import (
    Maximum,
    MaximumInCycles,
    MaximumLevel,
    MaximumOfProcess,
    MaximumOutside,
)
from pytest_cka_memory.core.process_limits import FlatProcess
from pytest_cka_memory.core.processes import WARMUP
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.errors import LimitError, SizeError
from pytest_cka_memory.units import MB, megabytes

__all__ = [
    "Breach",
    "FitsCards",
    "FlatPerBatch",
    "FlatProcess",
    "Limit",
    "Maximum",
    "MaximumInCycles",
    "MaximumLevel",
    "MaximumOfProcess",
    "MaximumOutside",
    "Unjudged",
    "Verdict",
    "default_limits",
    "fits",
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


def no_cycles() -> MaximumInCycles:
    """Return a limit of 0 bytes on what only the garbage collector frees."""
    return MaximumInCycles("no_cycles", "cycle_bytes", 0)


def max_cycles_mb(limit: object) -> MaximumInCycles:
    """Return a limit on what was allocated in the region and only the garbage collector frees.

    Args:
        limit: a number of MB (2**20 bytes), or a text such as ``'512 KiB'``.

    Raises:
        SizeError: if `limit` is not a valid size.
    """
    return MaximumInCycles(f"max_cycles_mb({limit!r})", "cycle_bytes", megabytes(limit))


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


def fits(*cards: object) -> FitsCards:
    """Return a limit on the peak: it must fit the memory of each card.

    Args:
        cards: names of cards that can be emulated.

    Raises:
        LimitError: if a card is not known, or none is named.
    """
    unknown = [name for name in cards if name not in CARDS]
    if unknown or not cards:
        wrong = f"unknown card {unknown[0]!r}" if unknown else "no card is named"
        raise LimitError(f"{wrong}; write names from {', '.join(CARDS)}, e.g. fits('t4', 'a10')")
    known = [CARDS[str(name)] for name in dict.fromkeys(cards)]
    return FitsCards(
        f"fits({', '.join(repr(card.name) for card in known)})",
        tuple(CardMemory(card.name, card.total_bytes, CONTEXT_BYTES) for card in known),
    )


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
