"""What a message adds for a test that needs too much memory.

Why its reserve is larger than what is in use: what it consists of, and who keeps it. And the
command that tries what would lower the peak.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.record_parts import Refusal
from pytest_cka_memory.core.report import is_scope
from pytest_cka_memory.core.reserve import (
    MOST_DESCRIBED,
    ReservePart,
    reserve_advice,
    reserve_lines,
    total_of,
)
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.sentences import are_mostly_workspaces
from pytest_cka_memory.core.verdicts import Breach
from pytest_cka_memory.meters import is_emulated
from pytest_cka_memory.reports import wrapped
from pytest_cka_memory.units import MB, counted, format_with_unit

_MOST_KEEPERS = 3
_LEAST_SHARE = 0.01
"""Blocks that keep less than this share of the reserve are not worth a line."""
_MOSTLY = 0.9
"""Of the highest reserve. What is explained at less says little about it."""
UNSEEN = (
    "call region.batch_done() while the reserved memory is high, so that it can be explained at "
    "that moment; this time the allocator had already released most of it"
)
"""The advice if the reserve was only explained when most of it had been released."""


def reserve_explanation(record: RegionRecord, width: int) -> Iterator[str]:
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
    if _is_of_another_moment(record):
        highest = format_with_unit(record.reserved_peak_bytes or 0)
        lower = f"the highest reserve was {highest}, at another moment; its parts are not known"
        yield from wrapped(lower, width, "  ")
        yield from wrapped(f"what to do: {UNSEEN}", width, "  ")
        return
    advice = reserve_advice(record.reserve, has_limit=record.refusal is None)
    if advice and (record.refusal is None or would_fit(record.refusal, record.reserve)):
        yield from wrapped(f"what to do: {advice}", width, "  ")


def _is_of_another_moment(record: RegionRecord) -> bool:
    """Whether the reserve was much higher than where it was explained: something released it."""
    explained_bytes = total_of(record.reserve).reserved_bytes
    highest_bytes = record.reserved_peak_bytes or 0
    return record.refusal is None and explained_bytes < _MOSTLY * highest_bytes


def _keepers(record: RegionRecord, width: int) -> Iterator[str]:
    """Yield a line for each group of blocks that keeps free memory from being released."""
    least = _LEAST_SHARE * total_of(record.reserve).reserved_bytes
    keepers = [it for it in record.reserve_kept_by if (it.keeps_bytes or 0) > least]
    for holding in keepers[:_MOST_KEEPERS]:
        yield from wrapped(keeper_line(holding), width, "  ")
    if len(keepers) > _MOST_KEEPERS:
        yield f"  and {counted(len(keepers) - _MOST_KEEPERS, 'other group')} that keep free memory"
    known = record.reserve_kept_by
    rest_bytes = total_of(record.reserve).free_part_bytes - sum(it.keeps_bytes or 0 for it in known)
    if rest_bytes > least and sum(it.count for it in known) >= MOST_DESCRIBED:
        rest = format_with_unit(rest_bytes)
        yield from wrapped(
            f"and more blocks, not listed, that keep the other {rest} of free memory", width, "  "
        )


def keeper_line(holding: Holding) -> str:
    """Return one sentence: ``2.00 MB made at train.py:13, held by kept[0], prevents ...``."""
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
    kept = format_with_unit(holding.keeps_bytes or 0)
    prevent, it = ("prevents", "it") if holding.count == 1 else ("prevent", "them")
    return f"{', '.join(parts)}, {prevent} the release of {kept} of free memory beside {it}"


def refusal_verdict(refusal: Refusal, reserve: Sequence[ReservePart]) -> str:
    """Return whether a refused allocation lacked memory, or only one piece of memory.

    Args:
        refusal: the allocation.
        reserve: what was reserved then.
    """
    wanted = format_with_unit(refusal.requested_bytes)
    asked = f"{wanted} were requested, but the card has {format_with_unit(refusal.free_bytes)} left"
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


_LEVELS = ("peak_increase_bytes", "peak_bytes")
_RESERVE = "reserved_increase_bytes"
_LIMITS = ("max_peak_mb", "max_level_mb", "max_reserved_mb", "fits", "--cka-memory-max-peak-mb")
WORKSPACES_ADVICE = (
    "add the workspaces to the limit, or give the test larger inputs; each first product on a card "
    "allocates them again, because a region begins without any, and a change of the code does not "
    "make them smaller"
)
"""The advice if a peak consists of workspaces mostly."""
_REPAIR = "this command tries changes that may lower the memory of this test, and prints the edits:"


def repair_lines(
    nodeid: str, facts: Mapping[str, Any], breach: Breach, record: RegionRecord
) -> Iterator[str]:
    """Yield two lines if a broken limit is one on a peak or a reserve."""
    if not nodeid or is_scope(nodeid) or not is_on_a_peak(breach):
        return
    if are_mostly_workspaces(record, breach.figure):  # no change would lower the peak
        return
    budget = ""
    if breach.figure in _LEVELS and breach.measured_bytes is not None:
        # The command compares the whole level.
        excess_bytes = breach.measured_bytes - breach.allowed_bytes
        allowed_bytes = record.peak_bytes - excess_bytes
        whole = f"{int(100 * allowed_bytes / MB) / 100:g}MB"  # rounded down
        budget = f" --to {whole if allowed_bytes >= MB else f'{allowed_bytes}B'}"
    yield f"  {_REPAIR}"
    yield f"    {_repair_command(nodeid, facts)}{budget}"


def is_on_a_peak(breach: Breach) -> bool:
    """Whether a limit is one on how high a peak or a reserve may be.

    Not one of a baseline: what has risen since is found by what the message says.
    """
    is_known = breach.figure in (*_LEVELS, _RESERVE) and breach.measured_bytes is not None
    return is_known and breach.limit.startswith(_LIMITS)


def repair_of_out_of_memory(nodeid: str, facts: Mapping[str, Any]) -> list[str]:
    """Return the lines for a test that has run out of the device's memory."""
    return [
        _REPAIR.replace("lower the memory of this test", "make this test fit"),
        f"  {_repair_command(nodeid, facts)}",
    ]


def _repair_command(nodeid: str, facts: Mapping[str, Any]) -> str:
    """Return the command for a test on the device of a session."""
    device = str(facts["device"]).partition(", device")[0]
    options = f" --device {device}"
    if is_emulated(device):
        options = f" --card {device.rpartition(':')[2]}"
    return f"python -m pytest_cka_memory repair {shlex.quote(nodeid)}{options}"
