"""Group the storages that a region retained by where they were allocated and what holds them."""

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from pytest_cka_memory.core.allocations import Allocation, AllocationGroup, AllocationSite
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.core.libraries import OWN_FOLDERS
from pytest_cka_memory.holders import (
    expressions,
    graphs,
    hints,
    links,
    module_paths,
    owners,
    packed_parameters,
)
from pytest_cka_memory.holders.proof import Proofs, Roots
from pytest_cka_memory.holders.roots import (
    Root,
    context_root,
    frame_roots,
    module_roots,
    signal_root,
    traceback_roots,
)
from pytest_cka_memory.holders.search import Reference, search
from pytest_cka_memory.holders.torch_references import (
    dtype_and_shape_of,
    is_pinned_tensor,
    tensor_rules,
)
from pytest_cka_memory.holders.unreached import Unreached, unreached

_REBUILT = "each batch replaces {} by a larger one: limit its length, or empty it between batches"


class Entry(NamedTuple):
    """One storage, described."""

    holding: Holding
    group: tuple[object, ...]
    """Equal for storages of the same allocation site and the same pattern of holder."""
    batch: int | None
    module: int = 0
    """Identity of the module that allocated it; 0 if unknown."""
    allocation: Allocation | None = None
    """None if references to it were not searched for, so that there is no advice."""
    path: Sequence[Reference] | None = None
    """The references that lead to it; None if none were found."""
    owner: owners.Owner | None = None
    """What holds it, if no name leads to it but an object has it."""
    unnamed: Unreached | None = None
    """How that object is kept alive."""


def holdings(
    allocations: Iterable[Allocation],
    named_values: Mapping[str, Any],
    boundaries: Sequence[int] = (),
    error: BaseException | None = None,
    *,
    with_paths: bool = False,
) -> tuple[Holding, ...]:
    """Group live `allocations` by allocation site and holder, largest group first.

    Args:
        allocations: storages to describe; those that have been freed are left out.
        named_values: values that the user knows by name, such as a test's fixtures.
        boundaries: the number of allocations before each batch boundary.
        error: an exception; the frames of its traceback have ended, but the user knows their names.
        with_paths: whether to describe every reference on the paths to the largest of each group.
    """
    from pytest_cka_memory.meters.torch_private import no_torch_function

    # In the order of allocation, so that of equally large ones the same is described every time.
    ordered = sorted(allocations, key=lambda found: found.serial)
    live = {found.key: found for found in ordered if found.is_live()}
    was_enabled = gc.isenabled()
    gc.disable()  # a collection during the search would only cost time
    try:
        # The user's modes must not see these calls.
        with no_torch_function(), expressions.remembering_places():
            paths, unreached = _search(live.values(), named_values, error)
            entries = [
                _entry(found, paths.get(key), unreached.get(key), boundaries)
                for key, found in live.items()
            ]
            proofs = Proofs([*paths.values(), *(found.path for found in unreached.values())])
            roots = partial(_roots, named_values, error)
            return grouped(entries, partial(_proved, proofs, roots, with_paths))
    finally:
        packed_parameters.are_live.cache_clear()
        if was_enabled:
            gc.enable()


def group_by_site(groups: Sequence[AllocationGroup]) -> tuple[Holding, ...]:
    """Merge `groups`, live or freed, by allocation site and kind, largest first.

    Everything that was allocated before the region comes last, by its kind alone.
    """
    from pytest_cka_memory.meters.torch_private import no_torch_function

    inside = [group for group in groups if not group.before_region]
    early = [group for group in groups if group.before_region]
    with no_torch_function():  # the user's modes must not see these calls
        if not any(group.context is not None or group.older is not None for group in groups):
            entries = [_peak_entry(group, None) for group in inside]
            counts = (Holding(bytes=group.bytes, count=group.count) for group in early)
            before = grouped(Entry(holding, (), None) for holding in counts)
        else:
            from pytest_cka_memory.holders.kinds import KindsNow

            older = [{} if group.older is None else group.older() for group in early]
            blocks = {group.address: group.bytes for group in inside if group.address}
            kinds = KindsNow({key: size for known in older for key, size in known.items()} | blocks)
            entries = [_peak_entry(group, kinds.kind_of(group)) for group in inside]
            before = tuple(
                Holding(bytes=size, count=0, kind=kind)
                for group, known in zip(early, older, strict=True)
                for kind, size in kinds.kinds_of_older(group.bytes, known).items()
            )
        return (*grouped(entries), *(replace(holding, before_region=True) for holding in before))


def unowned(rest_bytes: int) -> tuple[Holding, ...]:
    """Describe `rest_bytes` of which only the sum is known, because no tensor owns them."""
    if rest_bytes <= 0:
        return ()
    return (Holding(bytes=rest_bytes, count=0, hint=owners.unowned()),)


def rebuilt(holdings: Iterable[Holding], early: Iterable[Allocation]) -> tuple[Holding, ...]:
    """Return what takes more bytes than `early` of the same line, largest rise first.

    ``state = torch.cat([state, batch])`` allocates a larger tensor in each batch and frees the one
    before, so that nothing is kept from batch to batch.

    Args:
        holdings: what is live now.
        early: what was live at an early batch boundary; it may have been freed since.
    """
    early_bytes: Counter[object] = Counter()
    for allocation in early:
        if allocation.site is not None:
            early_bytes[_line_of(allocation.site.frames, allocation.site.code)] += allocation.bytes
    lines: dict[object, list[Holding]] = {}
    for holding in holdings:
        if holding.created_at:
            lines.setdefault(_line_of(holding.created_at, holding.code), []).append(holding)
    rises = {
        line: sum(holding.bytes for holding in found) - early_bytes[line]
        for line, found in lines.items()
    }
    grown = sorted(
        (line for line in lines if early_bytes[line] and rises[line] > 0),
        key=lambda line: -rises[line],
    )
    return tuple(
        replace(
            lines[line][0],
            bytes=sum(found.bytes for found in lines[line]),
            count=sum(found.count for found in lines[line]),
            early_bytes=early_bytes[line],
            hint=_REBUILT.format(_name_of(lines[line][0])),
        )
        for line in grown
    )


def _name_of(holding: Holding) -> str:
    """Return how users call what holds it."""
    return f"`{expressions.without_root(holding.held_by)}`" if holding.held_by else "it"


def _line_of(frames: Sequence[str], code: str | None) -> object:
    return tuple(frames[:1]), code


Prove = Callable[[Holding, Sequence[Entry]], Holding]
"""Adds to a group what is proved about its holders."""


def grouped(
    entries: Iterable[Entry], prove: Prove = lambda holding, _: holding
) -> tuple[Holding, ...]:
    entries = list(entries)
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    modules = module_paths.paths_of(
        {entry.module for members in groups.values() for entry in members if entry.module}
    )
    merged = []
    sites = {id(entry.path[-1].value): entry for entry in entries if entry.path}
    for members in groups.values():
        largest = max(members, key=lambda entry: entry.holding.bytes)
        size = sum(entry.holding.bytes for entry in members)
        batches = len({entry.batch for entry in members if entry.batch is not None}) or None
        count = sum(entry.holding.count for entry in members)
        sizes = ((entry.module, entry.holding.bytes) for entry in members)
        module = module_paths.largest(sizes, modules)
        found = replace(largest.holding, bytes=size, count=count, batches=batches, module=module)
        if largest.allocation is not None:
            paths = [entry.path for entry in (largest, *members) if entry.path]
            hint = hints.hint_for(largest.allocation, paths, found.held_by, batches)
            hint = graphs.advice(paths, batches, partial(_made_in_loop, sites)) or hint
            hint = hint if largest.owner is None else largest.owner.advice
            found = prove(replace(found, hint=hint), [largest, *members])
        merged.append(found)
    return tuple(sorted(merged, key=lambda holding: -holding.bytes))


def _proved(
    proofs: Proofs, roots: Roots, with_paths: bool, holding: Holding, members: Sequence[Entry]
) -> Holding:
    """Add which bytes are freed with the reference of each, or what else holds the largest.

    Args:
        proofs: counts references.
        roots: returns the names at which a search for other holders starts.
        with_paths: whether to add a description of every reference that leads to the largest.
        holding: the group.
        members: the largest of the group, and all of them.
    """
    largest, *every = members
    if largest.path is None:
        if with_paths and largest.unnamed is not None:
            return replace(holding, paths=(links.of_unreached(largest.unnamed),))
        return holding
    freed = (
        each
        for each in every
        if each.path
        and proofs.is_only_reference(each.path)
        and not (each.allocation and each.allocation.is_shared())
    )
    others: Sequence[Sequence[Reference]] = ()
    if freed_bytes := sum(each.holding.bytes for each in freed):
        holding = replace(holding, freed_bytes=freed_bytes)
    else:
        others = proofs.other_paths(largest.path, roots)
        holding = replace(holding, also_held_by=tuple(map(expressions.expression_of, others)))
    if not with_paths:
        return holding
    return replace(holding, paths=tuple(map(links.of_path, [largest.path, *others])))


def _made_in_loop(entries: Mapping[int, Entry], value: Any) -> str:
    """Return the code and the place that made the storage of a tensor after the first batch."""
    entry = entries.get(id(value))
    if entry is None or not entry.batch or not entry.holding.created_at:
        return ""
    code = f"`{entry.holding.code}` at " if entry.holding.code else ""
    return f" by {code}{entry.holding.created_at[0].partition(' in ')[0]}"


def _entry(
    allocation: Allocation,
    path: Sequence[Reference] | None,
    unnamed: Unreached | None,
    boundaries: Sequence[int],
) -> Entry:
    held_by = expressions.expression_of(path) if path else None
    owner = None if path or unnamed is None else owners.owner_of(unnamed, allocation)
    if owner is not None and unnamed is not None:
        held_by, path = owner.text, unnamed.path
    count = 0 if allocation.may_be_unowned and not path else 1
    holding = described(allocation.bytes, count, allocation.site)
    more: dict[str, Any] = {"held_by": held_by}
    if path and holding.shape is None:
        more["dtype"], more["shape"] = dtype_and_shape_of(path[-1].value)
    if path:
        more["pinned"] = is_pinned_tensor(path[-1].value)
    holding = replace(holding, **more)  # once, because it takes 20 us and there may be 100,000
    batch = sum(serial < allocation.serial for serial in boundaries) if boundaries else None
    pattern = expressions.pattern_of(held_by) if owner is None else owner.pattern
    group = site_key(allocation.site), pattern, holding.pinned
    known = path if owner is None else None
    module = _module_of(allocation.site)
    return Entry(holding, group, batch, module, allocation, known, owner, owner and unnamed)


def _peak_entry(group: AllocationGroup, kind: str | None) -> Entry:
    site = None if group.recorded is None else group.recorded.readable()
    count = group.count if group.inside is None else 0
    holding = replace(described(group.bytes, count, site), inside=group.inside, kind=kind)
    return Entry(holding, (site_key(site), group.inside, kind), None, _module_of(site))


def _module_of(site: AllocationSite | None) -> int:
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


def _search(
    live: Collection[Allocation], named_values: Mapping[str, Any], error: BaseException | None
) -> tuple[dict[int, list[Reference]], dict[int, Unreached]]:
    """Return what names lead to, and what no name leads to."""
    if not live:
        return {}, {}
    rules = tensor_rules({found.key: found.bytes for found in live if found.is_at_key})
    keys = [found.key for found in live]
    # The roots are not kept, because all that is not reached is searched next.
    found = search(rules, keys, *_roots(named_values, error))
    missing = {key for key in keys if key not in found.paths}
    return found.paths, unreached(rules, missing, found.walk) if missing else {}


def _roots(
    named_values: Mapping[str, Any], error: BaseException | None
) -> tuple[list[Root], list[Root]]:
    """Return the names of users, and those of installed code."""
    named_roots = [
        Root("", " (the test's)" if name == "self" else " (a fixture)", {name: value})
        for name, value in named_values.items()
    ]
    ended = [] if error is None else traceback_roots(error, _is_own)
    roots = [*ended, *frame_roots(_is_own), context_root(), signal_root(), *module_roots()]
    early = [*named_roots, *(root for root in roots if not root.is_library)]
    return early, [root for root in roots if root.is_library]


def _is_own(filename: str) -> bool:
    return filename.startswith(OWN_FOLDERS)
