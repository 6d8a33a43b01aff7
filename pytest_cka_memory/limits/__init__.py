"""Build the limits of the markers from their arguments. Does not import pytest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from emulated_cuda import cards
from emulated_cuda.cards import CARDS, CONTEXT_BYTES, Card
from pytest_cka_memory.core.figure_rows import PROCESS
from pytest_cka_memory.core.figures import FIGURES
from pytest_cka_memory.core.markers import MARKERS
from pytest_cka_memory.core.retention import PROCESS_WARMUP
from pytest_cka_memory.core.verdicts import Breach, Limit, Unjudged, Verdict
from pytest_cka_memory.errors import LimitError, SizeError
from pytest_cka_memory.limits.figures import (
    LEVELS,
    CardMemory,
    FitsCards,
    FlatPerBatch,
    FlatProcess,
    Maximum,
)
from pytest_cka_memory.units import MB, megabytes

__all__ = [
    "Breach",
    "FitsCards",
    "FlatPerBatch",
    "FlatProcess",
    "Limit",
    "Maximum",
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
    "max_pools_mb",
    "max_process_mb",
    "max_reserved_mb",
    "max_retained_mb",
    "no_cycles",
    "zero_retention",
]

# Each marker takes `scope` and `warn`. An argument by which one test may have the marker twice, as
# `scope` and `of` are, also belongs into `_closest_of_each` in `plugin/item_limits.py`.
SCOPES = ("function", "class", "module")
"""What a limit can be judged over; the first is the default."""


def only_warns(kwargs: Mapping[str, Any]) -> bool:
    """Return the argument ``warn`` of a marker, which is False by default.

    Raises:
        LimitError: if it is neither True nor False.
    """
    warns = kwargs.get("warn", False)
    if not isinstance(warns, bool):
        raise LimitError(
            f"warn={warns!r} is neither True nor False; write warn=True, or leave it out"
        )
    return warns


def scope_of(kwargs: Mapping[str, Any]) -> str:
    """Return the argument ``scope`` of a marker, which is ``function`` by default.

    Raises:
        LimitError: if there is no such scope.
    """
    scope = kwargs.get("scope", SCOPES[0])
    if scope not in SCOPES:
        raise LimitError(
            f"scope={scope!r} is not a scope; write one of {', '.join(map(repr, SCOPES))}"
        )
    return str(scope)


def with_argument(text: str, argument: str) -> str:
    """Return a limit as its user has written it, with one more argument: ``warn=True``."""
    start, bracket, arguments = text.partition("(")
    return f"{start}({arguments[:-1]}, {argument})" if bracket else f"{start}({argument})"


def call_text(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a marker as its user has written it, such as ``max_peak_mb(limit=-1)``."""
    given = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{name}({', '.join(given)})"


def _maximum(marker: str) -> Callable[[object], Maximum]:
    """Return the builder of a marker that limits a figure to a number of MB."""

    def build(limit: object) -> Maximum:
        if FIGURES[row.figure].measured_by == PROCESS:
            _require_psutil()
        return Maximum(f"{marker}({limit!r})", row.figure, megabytes(limit))

    row = MARKERS[marker]
    build.__name__ = build.__qualname__ = marker
    build.__doc__ = f"""Return the limit of ``{marker}``: {row.help}

    Args:
        limit: a number of MB (2**20 bytes), or a text such as ``'512 KiB'``.

    Returns:
        The limit; a figure that is equal to it keeps it.

    Raises:
        SizeError: if `limit` is not a valid size.
        LimitError: for the memory of the process, if psutil is not installed.

    Example:
        >>> {marker}("512 KiB").allowed_bytes
        524288
    """
    return build


def _nothing(marker: str) -> Callable[[], Maximum]:
    """Return the builder of a marker that allows 0 bytes of a figure."""

    def build() -> Maximum:
        return Maximum(marker, row.figure, 0)

    row = MARKERS[marker]
    build.__name__ = build.__qualname__ = marker
    build.__doc__ = f"""Return the limit of ``{marker}``: {row.help}

    Returns:
        The limit, of 0 bytes.

    Example:
        >>> {marker}().allowed_bytes
        0
    """
    return build


def _require_psutil() -> None:
    if find_spec("psutil") is None:
        raise LimitError(
            "measuring the memory of the process needs psutil, which is not installed; run pip "
            "install 'pytest-cka-memory[process]'"
        )


max_retained_mb = _maximum("max_retained_mb")
max_peak_mb = _maximum("max_peak_mb")
max_level_mb = _maximum("max_level_mb")
max_reserved_mb = _maximum("max_reserved_mb")
max_cycles_mb = _maximum("max_cycles_mb")
max_process_mb = _maximum("max_process_mb")
max_outside_mb = _maximum("max_outside_mb")
max_pools_mb = _maximum("max_pools_mb")
zero_retention = _nothing("zero_retention")
no_cycles = _nothing("no_cycles")


def flat_per_batch(
    tolerance_mb: object = 0.0, warmup: object = 1, *, of: object = "allocated"
) -> FlatPerBatch:
    """Return a limit on the growth of live memory, or of another level, per batch.

    Args:
        tolerance_mb: growth that is allowed, in MB (2**20 bytes), or a text such as ``'4 KiB'``.
        warmup: batches at the start that are not judged.
        of: ``"allocated"``, what is in use; ``"reserved"``, the allocator's reserve; ``"pools"``,
            what private pools reserve; or ``"outside"``, the card's memory outside torch's
            allocator.

    Returns:
        The limit; a region with fewer than four full batches after `warmup` breaks it, because its
        growth is not known.

    Raises:
        SizeError: if `tolerance_mb` is not a valid size.
        LimitError: if `warmup` is not a whole number of batches, or `of` is no such level.

    Example:
        >>> flat_per_batch("4 KiB", warmup=2).text
        "flat_per_batch(tolerance_mb='4 KiB', warmup=2)"
    """
    tolerance_bytes, arguments = _tolerance_and_text(tolerance_mb, warmup, 0, 1)
    assert isinstance(warmup, int), "checked"
    if of == "process":
        raise LimitError(
            "of='process' is not a figure that flat_per_batch can limit; use the marker "
            "flat_process_per_batch, which judges steady growth"
        )
    if not isinstance(of, str) or of not in LEVELS:
        raise LimitError(
            f"of={of!r} is not a figure whose growth can be limited; write one of "
            f"{', '.join(map(repr, LEVELS))}"
        )
    text = f"flat_per_batch{arguments}"
    text = text if of == "allocated" else with_argument(text, f"of={of!r}")
    return FlatPerBatch(text, tolerance_bytes, warmup, of=of)


def flat_process_per_batch(
    tolerance_mb: object = 1.0, warmup: object = PROCESS_WARMUP
) -> FlatProcess:
    """Return a limit on the steady growth of the memory of the process and its children.

    Args:
        tolerance_mb: growth per batch that is allowed, in MB (2**20 bytes), or a text such as
            ``'64 KiB'``.
        warmup: batches at the start that are not judged.

    Returns:
        The limit; growth is steady if both halves of the batches grow.

    Raises:
        SizeError: if `tolerance_mb` is not a valid size.
        LimitError: if `warmup` is not a whole number of batches, or psutil is not installed.
    """
    _require_psutil()
    tolerance_bytes, arguments = _tolerance_and_text(tolerance_mb, warmup, MB, PROCESS_WARMUP)
    assert isinstance(warmup, int), "checked"
    return FlatProcess(f"flat_process_per_batch{arguments}", tolerance_bytes, warmup)


def fits(*cards: object, beside: object = None) -> FitsCards:
    """Return a limit on the peak: it must fit the memory of each card.

    Args:
        cards: names of cards that can be emulated.
        beside: what is kept free of a card's memory for the CUDA context, loaded kernels and
            libraries, in MB or as a text with a unit; ``"seen"`` for the most that processes on
            such cards were seen to have. By default 512 MB, the least that an emulated card keeps.

    Returns:
        The limit.

    Raises:
        LimitError: if a card is not known, or none is named.
        SizeError: if `beside` is neither ``"seen"`` nor a valid size.

    Example:
        >>> fits("t4", "a10").text
        "fits('t4', 'a10')"
        >>> [card.usable_bytes // 2**20 for card in fits("h100", beside="700 MB").cards]
        [80308]
    """
    unknown = [name for name in cards if name not in CARDS]
    if unknown or not cards:
        wrong = f"unknown card {unknown[0]!r}" if unknown else "no card is named"
        raise LimitError(f"{wrong}; write names from {', '.join(CARDS)}, e.g. fits('t4', 'a10')")
    known = [CARDS[str(name)] for name in dict.fromkeys(cards)]
    argument = "" if beside is None else f", beside={beside!r}"
    return FitsCards(
        f"fits({', '.join(repr(card.name) for card in known)}{argument})",
        tuple(_memory_of(card, beside) for card in known),
    )


def _memory_of(card: Card, beside: object) -> CardMemory:
    """Return the memory of a card, of which this much is kept free.

    Raises:
        SizeError: if that is neither ``"seen"`` nor a valid size.
    """
    seen = cards.outside_reserve_of(card)
    if beside is None:
        kept = CONTEXT_BYTES
    else:
        kept = max(CONTEXT_BYTES, seen[1]) if beside == "seen" else megabytes(beside)
    return CardMemory(card.name, card.total_bytes, kept, seen)


def _tolerance_and_text(
    tolerance_mb: object, warmup: object, default_bytes: int, default_warmup: int
) -> tuple[int, str]:
    """Return the bytes of a tolerance, and both arguments as a user writes them.

    Raises:
        SizeError: if `tolerance_mb` is not a valid size.
        LimitError: if `warmup` is not a whole number of batches.
    """
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise LimitError(
            f"warmup={warmup!r} is not a whole number of at least 0; write a number of batches, "
            "e.g. warmup=1"
        )
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
    marker_text = call_text(name, args, kwargs)
    rest = {key: value for key, value in kwargs.items() if key not in ("warn", "scope")}
    try:
        built, warns, scope = build(*args, **rest), only_warns(kwargs), scope_of(kwargs)
        if warns and isinstance(built, Limit):
            built = replace(built, warns=True, text=with_argument(built.text, "warn=True"))
        if scope == SCOPES[0]:
            return built
        if not isinstance(built, Maximum):
            raise LimitError(f"{name} is always judged for each region; leave out scope={scope!r}")
        text = with_argument(built.text, f"scope={scope!r}")
        return replace(built, scope=scope, text=text)
    except (SizeError, LimitError) as error:
        raise LimitError(f"{marker_text}: {error}") from None
    except TypeError:
        hint = f"wrong arguments; write e.g. @pytest.mark.{marker.example}"
        raise LimitError(f"{marker_text}: {hint}") from None


def default_limits(
    own: Sequence[Limit], max_retained_bytes: int | None, max_peak_bytes: int | None
) -> list[Limit]:
    """Return the limits of the session's options, except on figures that `own` limits already."""
    offered = (
        ("--cka-memory-max-retained-mb", "retained_bytes", max_retained_bytes),
        ("--cka-memory-max-peak-mb", "peak_increase_bytes", max_peak_bytes),
    )
    limited = {limit.figure for limit in own if isinstance(limit, Maximum)}
    return [
        Maximum(f"{option}={size / MB:g}", figure, size)
        for option, figure, size in offered
        if size is not None and figure not in limited
    ]
