"""Which of the storages that are live explain that a level rises from batch to batch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.holders.expressions import without_root

_REBUILT = "each batch replaces `{}` by a larger one: limit its length, or empty it between batches"


def growing(
    holdings: Iterable[Holding], early: Iterable[Allocation], batches: int
) -> tuple[Holding, ...]:
    """Return what was allocated in several batches, or is rebuilt larger in each.

    What explains most bytes per batch comes first.

    Args:
        holdings: what is live now.
        early: what was live at an early batch boundary; it may have been freed since.
        batches: how many batches have ended since that boundary.
    """
    kept: list[Holding] = []
    others: list[Holding] = []
    for holding in holdings:
        (kept if (holding.batches or 0) > 1 else others).append(holding)
    # What was only kept in the first batches, such as a cache that is full, explains no growth.
    kept = [holding for holding in kept if holding.bytes_per_batch] or kept
    lines = {_line_of(holding.created_at, holding.code): n for n, holding in enumerate(kept)}
    for holding in others:
        # The last tensor of a list is often the value of a variable, too, and found there.
        number = lines.get(_line_of(holding.created_at, holding.code))
        if number is not None and holding.created_at:
            per_batch = (kept[number].bytes_per_batch or 0) + (holding.bytes_per_batch or 0)
            kept[number] = replace(kept[number], bytes_per_batch=per_batch)
    replaced = [
        holding
        for holding in _rebuilt(others, early, batches)
        if _line_of(holding.created_at, holding.code) not in lines
    ]
    order = sorted([*kept, *replaced], key=lambda it: (-(it.bytes_per_batch or 0), -it.bytes))
    return tuple(order)


def explained_bytes(grown: Iterable[Holding]) -> float:
    """Return how many bytes per batch are explained by what :func:`growing` has returned."""
    return sum(holding.bytes_per_batch or 0 for holding in grown)


class _Before(NamedTuple):
    """What a line of code had in use."""

    bytes: int = 0
    freed: int = 0
    """How many of its tensors have been freed since."""


def _rebuilt(
    holdings: Iterable[Holding], early: Iterable[Allocation], batches: int
) -> list[Holding]:
    """Return what takes more bytes than `early` of the same line.

    ``state = torch.cat([state, batch])`` allocates a larger tensor in each batch and frees the one
    before, so that nothing is kept from batch to batch.
    """
    before: dict[object, _Before] = {}
    for allocation in early:
        if (site := allocation.site) is not None:
            line = _line_of(site.frames, site.code)
            known = before.get(line, _Before())
            freed = known.freed + (not allocation.is_live())
            before[line] = _Before(known.bytes + allocation.bytes, freed)
    lines: dict[object, list[Holding]] = {}
    for holding in holdings:
        if holding.created_at:
            lines.setdefault(_line_of(holding.created_at, holding.code), []).append(holding)
    grown = []
    for line, found in lines.items():
        size, count = sum(it.bytes for it in found), sum(it.count for it in found)
        known = before.get(line, _Before())
        if known.bytes and size > known.bytes:
            # A linked list, or a cache that is full, has freed none that a new one could replace.
            name = found[0].held_by if 0 < count <= known.freed else None
            hint = _REBUILT.format(without_root(name)) if name else found[0].hint
            per_batch = (size - known.bytes) / max(1, batches)
            grown.append(
                replace(
                    found[0],
                    bytes=size,
                    count=count,
                    early_bytes=known.bytes,
                    bytes_per_batch=per_batch,
                    hint=hint,
                )
            )
    return grown


def _line_of(frames: Sequence[str], code: str | None) -> object:
    return tuple(frames[:1]), code
