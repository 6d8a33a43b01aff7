"""Why a reserve is larger than what is in use, as text: what it consists of, and who keeps it."""

from collections.abc import Iterator, Sequence

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.core.record_parts import Refusal
from pytest_cka_memory.core.reserve import ReservePart, reserve_advice, reserve_lines, total_of
from pytest_cka_memory.reports.fitting import wrapped
from pytest_cka_memory.units import counted, format_with_unit

_MOST_KEEPERS = 3
_LEAST_SHARE = 0.01
"""Blocks that keep less than this share of the reserve are not worth a line."""


def explanation(record: RegionRecord, width: int) -> Iterator[str]:
    """Yield lines about the reserve of a region; nothing if it was not explained.

    If an allocation was refused, there is advice only if what is free would have been enough.
    """
    if not record.reserve:
        return
    first, *others = reserve_lines(record.reserve)
    yield from wrapped(f"{record.reserve_moment}: {first}", width, "  ")
    for line in others:
        yield from wrapped(line, width, "    ")
    yield from _keepers(record, width)
    advice = reserve_advice(record.reserve, has_limit=record.refusal is None)
    if advice and (record.refusal is None or would_fit(record.refusal, record.reserve)):
        yield from wrapped(f"what to do: {advice}", width, "  ")


def _keepers(record: RegionRecord, width: int) -> Iterator[str]:
    """Yield a line for each group of blocks that keeps free memory from being released."""
    least = _LEAST_SHARE * total_of(record.reserve).reserved_bytes
    keepers = [it for it in record.reserve_kept_by if (it.keeps_bytes or 0) > least]
    for holding in keepers[:_MOST_KEEPERS]:
        yield from wrapped(keeper_line(holding), width, "  ")
    if len(keepers) > _MOST_KEEPERS:
        yield f"  and {counted(len(keepers) - _MOST_KEEPERS, 'other group')} beside free memory"


def keeper_line(holding: Holding) -> str:
    """Return one sentence: ``2.00 MB made at train.py:13, held by kept[0], keeps 18.00 MB ...``."""
    parts = [format_with_unit(holding.bytes)]
    if holding.count > 1:
        parts[0] += f" in {counted(holding.count, 'tensor')}"
    if holding.created_at:
        code = f": `{holding.code}`" if holding.code else ""
        parts[0] += f" made at {holding.created_at[0]}{code}"
        parts += [f"from {frame}" for frame in holding.created_at[1:2]]
    elif holding.before_region:
        parts[0] += " from before the region"
    if holding.held_by:
        parts.append(f"held by {holding.held_by}")
    keep = "keeps" if holding.count == 1 else "keep"
    kept = format_with_unit(holding.keeps_bytes or 0)
    return f"{', '.join(parts)}, {keep} {kept} free memory beside it from being released"


def verdict(refusal: Refusal, reserve: Sequence[ReservePart]) -> str:
    """Return whether a refused allocation lacked memory, or only one piece of memory.

    Args:
        refusal: the allocation.
        reserve: what was reserved then.
    """
    wanted = format_with_unit(refusal.requested_bytes)
    asked = f"{wanted} were requested, the card has {format_with_unit(refusal.free_bytes)} left"
    if not reserve:
        lack = format_with_unit(_missing_bytes(refusal))
        return f"{asked} and nothing is in use, so at least {lack} more are needed"
    total = total_of(reserve)
    of_pools = sum(part.free_bytes for part in reserve if part.pool)
    shared_bytes = total.free_bytes - of_pools
    missing_bytes = _missing_bytes(refusal)
    if missing_bytes <= shared_bytes + total.waiting_bytes:
        return (
            f"{asked}, and {format_with_unit(shared_bytes + total.waiting_bytes)} are free in the "
            f"reserve, in blocks of at most {format_with_unit(total.largest_free_bytes)}: this is "
            "fragmentation"
        )
    if missing_bytes <= shared_bytes + total.waiting_bytes + of_pools:
        return (
            f"{asked}, and {format_with_unit(of_pools)} are free in private pools, which serve "
            "only their graphs"
        )
    more = missing_bytes - shared_bytes - total.waiting_bytes
    in_use = format_with_unit(total.in_use_bytes + total.rounding_bytes)
    return f"{asked}: {in_use} are in use, so at least {format_with_unit(more)} more are needed"


def would_fit(refusal: Refusal, reserve: Sequence[ReservePart]) -> bool:
    """Whether a refused allocation would fit if all that is free were in one piece."""
    free_bytes = sum(part.free_bytes + part.waiting_bytes for part in reserve)
    return _missing_bytes(refusal) <= free_bytes


def _missing_bytes(refusal: Refusal) -> int:
    """Return how much the driver lacked."""
    return refusal.requested_bytes - refusal.free_bytes
