"""Memory in groups, by where it was allocated and what it was for."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pytest_cka_memory.core.allocations import AllocationGroup, AllocationSite
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.core.kinds import ACTIVATIONS
from pytest_cka_memory.holders import module_paths, peaks


class Entry(NamedTuple):
    """Memory from one place, described."""

    holding: Holding
    group: tuple[object, ...]
    """Equal for memory that belongs to one group."""
    module: int = 0
    """Identity of the module that allocated it; 0 if unknown."""


def group_by_site(groups: Sequence[AllocationGroup]) -> tuple[Holding, ...]:
    """Merge `groups`, live or freed, by allocation site and kind, largest first.

    Everything that was allocated before the region comes last, by its kind alone.
    """
    from pytest_cka_memory.meters.torch_private import no_torch_function

    inside = [group for group in groups if not group.before_region]
    early = [group for group in groups if group.before_region]
    with no_torch_function():  # the user's modes must not see these calls
        if not any(group.context is not None or group.older is not None for group in groups):
            entries = [_entry_of(group, None) for group in inside]
            counts = (Holding(bytes=group.bytes, count=group.count) for group in early)
            before = grouped(Entry(holding, ()) for holding in counts)
        else:
            from pytest_cka_memory.holders.kinds import KindsNow

            older = [{} if group.older is None else group.older() for group in early]
            blocks = {group.address: group.bytes for group in inside if group.address}
            kinds = KindsNow({key: size for known in older for key, size in known.items()} | blocks)
            found = [kinds.kind_of(group) for group in inside]
            hint = peaks.advice(inside, found)
            entries = [
                _entry_of(group, kind, hint if kind == ACTIVATIONS else None)
                for group, kind in zip(inside, found, strict=True)
            ]
            before = tuple(
                Holding(bytes=size, count=0, kind=kind)
                for group, known in zip(early, older, strict=True)
                for kind, size in kinds.kinds_of_older(group.bytes, known).items()
            )
        return (*grouped(entries), *(replace(holding, before_region=True) for holding in before))


def grouped(entries: Iterable[Entry]) -> tuple[Holding, ...]:
    """Return one holding for each group, largest first."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    modules = module_paths.paths_of(
        {entry.module for members in groups.values() for entry in members if entry.module}
    )
    merged = []
    for members in groups.values():
        largest = max(members, key=lambda entry: entry.holding.bytes)
        sizes = ((entry.module, entry.holding.bytes) for entry in members)
        merged.append(
            replace(
                largest.holding,
                bytes=sum(entry.holding.bytes for entry in members),
                count=sum(entry.holding.count for entry in members),
                module=module_paths.largest(sizes, modules),
            )
        )
    return tuple(sorted(merged, key=lambda holding: -holding.bytes))


def _entry_of(group: AllocationGroup, kind: str | None, hint: str | None = None) -> Entry:
    site = None if group.recorded is None else group.recorded.readable()
    count = group.count if group.inside is None else 0
    holding = described(group.bytes, count, site)
    holding = replace(holding, inside=group.inside, kind=kind, hint=hint)
    return Entry(holding, (site_key(site), group.inside, kind), module_of(site))


def module_of(site: AllocationSite | None) -> int:
    return 0 if site is None else site.module


def described(size: int, count: int, site: AllocationSite | None) -> Holding:
    if site is None:
        return Holding(bytes=size, count=count)
    return Holding(
        bytes=size,
        count=count,
        dtype=site.dtype,
        shape=site.shape,
        operator=site.operator,
        created_at=site.frames,
        code=site.code,
    )


def site_key(site: AllocationSite | None) -> tuple[object, ...]:
    """Return what is equal for allocations of one line by the same expression and operator."""
    return () if site is None else (site.frames[:1], site.code, site.operator)
