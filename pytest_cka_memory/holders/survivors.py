"""Group the storages that a region retained by where they were allocated and what holds them.

The references that names lead to are searched first; those of C++ only for storages that are still
missing. Each group has one description: of its largest storage.
"""

import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

from pytest_cka_memory.core.allocations import Allocation, live_of
from pytest_cka_memory.core.places import OWN_FOLDERS
from pytest_cka_memory.core.retention import Holding, middle
from pytest_cka_memory.holders import (
    Paths,
    Reference,
    ReferenceTree,
    Root,
    chains,
    context_root,
    expressions,
    frame_roots,
    growing,
    hints,
    module_roots,
    owners,
    references,
    signal_root,
    tensors,
    traceback_roots,
)
from pytest_cka_memory.holders.groups import Patterns, holding_of, module_id_of, site_key
from pytest_cka_memory.holders.proof import Proofs, is_removable
from pytest_cka_memory.holders.references import tensor_rules
from pytest_cka_memory.holders.search import search
from pytest_cka_memory.holders.tensors import dtype_and_shape_of, is_pinned_tensor
from pytest_cka_memory.holders.unreached import UnreachedTree, find_unreached
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.collector import without_collections
from pytest_cka_memory.meters.objects import may_be_pinned

_AT_ONCE = 10_000
"""Storages after which it is checked whether to show a line that says what takes so long."""
_MANY = 100_000
"""Storages up to which no such line is shown."""
_AFTER_SECONDS = 2
_IS_OWN = methodcaller("startswith", OWN_FOLDERS)  # of a file whose frames are not the user's
Write = Callable[[str], None]
"""Shows one line to the user."""


def to_stderr(line: str) -> None:
    """Write a line to standard error."""
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Writes one line if the explanation of `count` storages takes more than 2 s.

    Args:
        count: how many storages there are.
        write: shows the line.
    """

    def __init__(self, count: int, write: Write = to_stderr) -> None:
        self._count, self._write = count, write
        self._due_at = time.monotonic() + _AFTER_SECONDS if count > _MANY else None

    def step(self) -> None:
        """Write the line if it is time; called several times in a second."""
        if self._due_at is not None and time.monotonic() >= self._due_at:
            self._due_at = None
            self._write(
                f"cka-memory: finding what holds {self._count:,} tensors; each 100,000 take "
                "1 to 2 s"
            )


def holdings(
    allocations: Iterable[Allocation],
    named_values: Mapping[str, Any],
    boundaries: Sequence[int] = (),
    error: BaseException | None = None,
    *,
    with_paths: bool = False,
    write: Write = to_stderr,
    keeps: Callable[[Iterable[int]], int] | None = None,
) -> tuple[Holding, ...]:
    """Group live `allocations` by allocation site and holder, largest group first.

    Args:
        allocations: storages to describe; those that have been freed are left out.
        named_values: values that the user knows by name, such as a test's fixtures.
        boundaries: the number of allocations before each batch boundary.
        error: an exception; the frames of its traceback have ended, but the user knows their names.
        with_paths: whether to describe every reference on the paths to the largest of each group.
        write: shows a line to the user if there are so many that it takes long.
        keeps: returns how much free memory storages at these addresses keep from being released;
            if given, the groups are sorted by it.

    Example:
        ``holdings(meter.allocations_since(mark), {"model": model})`` has for a list that a loop
        fills one holding, with ``held_by="train.LOSSES[0]"`` and the bytes of all its tensors.
    """
    # In the order of allocation, so that of equally large ones the same is described every time.
    live = sorted(live_of(allocations), key=attrgetter("serial"))
    try:
        # The user's modes must not see these calls.
        with torch_private.no_torch_function(), expressions.remembering_places():
            roots = partial(_roots, named_values, error)
            progress = Progress(len(live), write)
            parts = live, roots, boundaries, progress, with_paths, keeps
            # A collection during the search would only cost time.
            return without_collections(lambda: _Description(*parts).holdings())
    finally:
        references.has_packed_parameters.cache_clear()


@dataclass(slots=True)
class _Group:
    """Storages of the same allocation site that are held in the same way."""

    members: list[Allocation]
    """In the order of allocation."""
    ends: list[Reference]
    """The reference to the holder of each; empty if none was found."""
    tree: ReferenceTree | None
    """Has the references that lead to the holders; None if none were found."""

    def largest(self) -> tuple[Allocation, Reference | None]:
        """Return the first of the largest, and the reference to its holder."""
        sizes = [each.bytes for each in self.members]
        number = sizes.index(max(sizes))
        return self.members[number], self.ends[number] if self.ends else None


class _Description:
    """Describes live allocations by groups.

    Whatever is done once for each allocation takes the same time for each, and writes no text: so
    a million are described in ten times the time of a hundred thousand.
    """

    def __init__(
        self,
        live: Sequence[Allocation],
        roots: Callable[[], tuple[list[Root], list[Root]]],
        boundaries: Sequence[int],
        progress: Progress,
        with_paths: bool,
        keeps: Callable[[Iterable[int]], int] | None,
    ) -> None:
        self._live, self._boundaries, self._with_paths = live, boundaries, with_paths
        self._roots, self._progress, self._keeps = roots, progress, keeps
        self._named, self._unnamed = _search(live, roots, progress.step)
        self._proofs = Proofs(self._named, self._unnamed)
        self._sites: dict[int, tuple[tuple[object, ...], int]] = {}
        """By the identity of what was recorded: the key of the site, and the module."""
        self._names: dict[int, Sequence[str]] = {}
        """By the identity of an object that tensors are in."""

    def holdings(self) -> tuple[Holding, ...]:
        """Return the groups, largest first."""
        groups = self._groups()
        modules = tensors.module_paths({module for _, module in self._sites.values() if module})
        described = [
            self._described(group, pinned, owner, modules)
            for (*_, pinned), (group, owner) in groups.items()
        ]
        return tuple(sorted(described, key=lambda it: (-(it.keeps_bytes or 0), -it.bytes)))

    def _groups(self) -> dict[tuple[object, ...], tuple[_Group, owners.Owner | None]]:
        """Return the groups by site, pattern and whether they are pinned, with their owners."""
        is_pinned = is_pinned_tensor if may_be_pinned() else lambda _: False
        named, unnamed = Patterns(self._named), Patterns(self._unnamed)
        groups: dict[tuple[object, ...], _Group] = {}
        for number, allocation in enumerate(self._live):
            if number % _AT_ONCE == 0:
                self._progress.step()
            pattern, is_pinned_memory = 0, False
            last = self._named.find(allocation.key)
            tree: ReferenceTree | None = self._named
            if last is not None:
                pattern, is_pinned_memory = named.of(last), is_pinned(last.value)
            elif (last := self._unnamed.find(allocation.key)) is not None:
                pattern, is_pinned_memory = unnamed.of(last), is_pinned(last.value)
                tree = self._unnamed
            else:
                tree = None
            site, _ = self._sites.get(id(allocation.recorded)) or self._site_of(allocation)
            key = site, id(tree), pattern, is_pinned_memory
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group([], [], tree)
            group.members.append(allocation)
            if last is not None:
                group.ends.append(last)
        return self._by_owner(groups)

    def _by_owner(
        self, groups: Mapping[tuple[object, ...], _Group]
    ) -> dict[tuple[object, ...], tuple[_Group, owners.Owner | None]]:
        """Merge groups that no name leads to if they have the same owner."""
        merged: dict[tuple[object, ...], tuple[_Group, owners.Owner | None]] = {}
        for key, group in groups.items():
            if group.tree is not self._unnamed:
                merged[key] = group, None
                continue
            largest, _ = group.largest()
            owner = owners.owner_of(self._unnamed.unreached(largest.key), largest)
            site, *_, pinned = key
            known = merged.setdefault((site, owner.pattern, pinned), (group, owner))
            if known[0] is not group:
                known[0].members.extend(group.members)
                known[0].ends.extend(group.ends)
        return merged

    def _site_of(self, allocation: Allocation) -> tuple[tuple[object, ...], int]:
        """Return the key of the site of an allocation, and the module that allocated it."""
        identity = id(allocation.recorded)
        known = self._sites.get(identity)
        if known is None:
            site = allocation.site
            known = self._sites[identity] = site_key(site), module_id_of(site)
        return known

    def _described(
        self,
        group: _Group,
        pinned: object,
        owner: owners.Owner | None,
        modules: Mapping[int, str],
    ) -> Holding:
        members, (largest, last) = group.members, group.largest()
        batches, bytes_per_batch = self._batches_of(members)
        sizes = ((self._site_of(each)[1], each.bytes) for each in members)
        count = len(members) if group.tree else sum(not each.may_be_unowned for each in members)
        holding = replace(
            holding_of(sum(each.bytes for each in members), count, largest.site),
            batches=batches,
            bytes_per_batch=bytes_per_batch,
            module=tensors.largest_modules(sizes, modules),
            pinned=bool(pinned),
            keeps_bytes=self._keeps(each.key for each in members) if self._keeps else None,
        )
        if last is None:
            return replace(holding, hint=hints.hint_for(largest, None))
        if holding.shape is None:
            dtype, shape = dtype_and_shape_of(last.value)
            holding = replace(holding, dtype=dtype, shape=shape)
        if owner is not None:
            unreached = self._unnamed.unreached(largest.key)
            of_graph = growing.graph_advice_of_c_code(unreached.path, batches, self._made_in_loop)
            paths = (chains.links_of_unreached(unreached),) if self._with_paths else ()
            advice = of_graph or owner.advice
            return replace(holding, held_by=owner.text, hint=advice, paths=paths)
        every = Paths(self._named, [last, *group.ends])
        hint = growing.graph_advice(every, batches, self._made_in_loop)
        hint = hint or hints.hint_for(largest, every, batches)
        held_by = expressions.expression_of(every.first)
        return self._proved(replace(holding, held_by=held_by, hint=hint), group, every.first)

    def _batches_of(self, members: Sequence[Allocation]) -> tuple[int | None, float | None]:
        """Return in how many batches storages were allocated, and how many bytes in each.

        The bytes are those of the batches whose growth is judged. None each outside a batch loop.
        """
        ended = len(self._boundaries)
        if not ended:
            return None, None
        sizes: Counter[int] = Counter()
        for each in members:
            sizes[self._batch_of(each)] += each.bytes
        first = middle(ended)
        judged = sum(size for batch, size in sizes.items() if first <= batch < ended)
        return len(sizes), judged / (ended - first) if first < ended else 0.0

    def _batch_of(self, allocation: Allocation) -> int:
        return bisect_left(self._boundaries, allocation.serial)

    def _proved(self, holding: Holding, group: _Group, path: Sequence[Reference]) -> Holding:
        """Add which bytes are freed with the reference of each, or what else holds the largest.

        Args:
            holding: describes the group.
            group: its storages.
            path: the references that lead to the largest.
        """
        others: Sequence[Sequence[Reference]] = ()
        freed_bytes = 0
        for number, (each, last) in enumerate(zip(group.members, group.ends, strict=True)):
            if number % _AT_ONCE == 0:
                self._progress.step()
            if self._proofs.is_only_reference(last) and not each.is_shared():
                freed_bytes += each.bytes
        if freed_bytes:
            holding = replace(holding, freed_bytes=freed_bytes)
        else:
            others = self._proofs.other_paths(path, self._roots)
            holding = replace(holding, also_held_by=tuple(map(expressions.expression_of, others)))
        if not others:
            holding = replace(holding, hint=self._advice_for_same_object(path, holding.hint))
        if not self._with_paths:
            return holding
        return replace(holding, paths=tuple(map(chains.links_of_path, [path, *others])))

    def _advice_for_same_object(self, path: Sequence[Reference], advice: str | None) -> str | None:
        """Return `advice`, or the names of an object on the path if another name leads to it.

        Only in place of advice to delete a local variable, which would free nothing then.
        """
        if advice is None or advice != hints.local_object(path):
            return advice
        for number, reference in enumerate(path[:-1]):
            if is_removable(reference.value):
                names = self._names_of(path[: number + 1])
                if len(names) > 1:
                    return hints.of_same_object(names)
        return advice

    def _names_of(self, path: Sequence[Reference]) -> Sequence[str]:
        """Return the names in users' code that lead to the object at the end of `path`."""
        # Several tensors may be in it. As texts, because references are counted.
        identity = id(path[-1].value)
        if identity not in self._names:
            others = self._proofs.other_paths(path, self._roots, "object")
            of_users = [it for it in others if it[0].root and not it[0].root.is_library]
            self._names[identity] = [*map(expressions.expression_of, [path, *of_users])]
        return self._names[identity]

    def _made_in_loop(self, value: Any) -> str:
        """Return the code and the place that made the storage of a tensor after the first batch."""
        of_tensor = (
            each
            for each in self._live
            for last in (self._named.find(each.key) or self._unnamed.find(each.key),)
            if last is not None and last.value is value
        )
        allocation = next(of_tensor, None)
        site = None if allocation is None else allocation.site
        if allocation is None or not self._batch_of(allocation) or site is None or not site.frames:
            return ""
        code = f"`{site.code}` at " if site.code else ""
        return f" by {code}{site.frames[0].partition(' in ')[0]}"


def unowned(rest_bytes: int) -> tuple[Holding, ...]:
    """Describe `rest_bytes` of which only the sum is known, because no tensor owns them."""
    if rest_bytes <= 0:
        return ()
    return (Holding(bytes=rest_bytes, count=0, hint=owners.unowned()),)


def _search(
    live: Sequence[Allocation],
    roots: Callable[[], tuple[list[Root], list[Root]]],
    on_progress: Callable[[], None],
) -> tuple[ReferenceTree, UnreachedTree]:
    """Return what names lead to, and what no name leads to."""
    if not live:
        return ReferenceTree(), UnreachedTree()
    sizes = {each.key: each.bytes for each in live}
    are_blocks = all(each.is_at_key for each in live)
    rules = tensor_rules(
        sizes if are_blocks else {each.key: each.bytes for each in live if each.is_at_key}
    )
    # The roots are not kept, because all that is not reached is searched next.
    result = search(rules, sizes, *roots(), on_progress=on_progress)
    missing = sizes.keys() - result.tree.keys
    return result.tree, find_unreached(rules, missing, result.walk) if missing else UnreachedTree()


def _roots(
    named_values: Mapping[str, Any], error: BaseException | None
) -> tuple[list[Root], list[Root]]:
    """Return the names of users, and those of installed code."""
    named_roots = [
        Root("", " (the test's)" if name == "self" else " (a fixture)", {name: value})
        for name, value in named_values.items()
    ]
    ended = [] if error is None else traceback_roots(error, _IS_OWN)
    roots = [*ended, *frame_roots(_IS_OWN), context_root(), signal_root(), *module_roots()]
    early = [*named_roots, *(root for root in roots if not root.is_library)]
    return early, [root for root in roots if root.is_library]
