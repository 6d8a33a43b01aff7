"""Counts garbage in reference cycles while a region runs, without collecting it (`Census`)."""

import gc
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_cka_memory.meters.base import (
    OLDEST,
    Garbage,
    GarbageCounter,
    Meter,
    OlderGarbage,
)
from pytest_cka_memory.meters.blocks.python_objects import BEGIN, LATER, CompiledCensus, up_to
from pytest_cka_memory.meters.collector import collected_objects, without_collections

if TYPE_CHECKING:
    from pytest_cka_memory.meters.release import Freed

_AT_FIRST = 60_000
"""What counts of all objects may cost in a region before its first boundary, in objects that are
looked at: one takes 30 nanoseconds."""
_PER_BOUNDARY = 1_000
"""What they may cost more after each boundary."""
_PER_FOLLOWED = 60
"""What each tensor, storage or autograd node costs that is freed with the garbage,"""
_PER_ASKED = 240
"""and how much more if the library cannot follow it."""
_TIMES_AGAIN = 8
"""So often garbage that waits may be followed again, besides."""
_MOST_BEFORE = 300
"""So many objects that are older than the region are looked at as its own."""

_MOST_GROUPS = 1_000
"""If more groups of objects are garbage, each block counts as a group: to tell which of them
belong together would take longer than the loop."""


Look = Callable[[list[Any], Collection[int]], None]


class _Block(NamedTuple):
    """A block that garbage keeps alive."""

    address: int
    serial: int
    allocated_bytes: int
    requested_bytes: int


class _Waiting(NamedTuple):
    """Garbage that was found at one count, and what is freed with it later.

    A variable of a loop often keeps the memory of a view for a batch longer than the view.
    """

    garbage: frozenset[int]
    """Identities."""
    waiting: frozenset[int]
    """Identities of objects that would be freed if C++ did not reference them."""
    cost: int
    """What it costs to follow it."""
    found_at: int
    """The number of that count."""


class Census(GarbageCounter):
    """The garbage of one region, counted without collecting it. Keeps no object alive.

    Only objects that were created in the region are looked at, and those since the last region
    ended, if they are few: what a loop is given is among these. Older ones count as in use. Each is
    looked at in the first two counts after its creation, which costs less than to create it. An
    object that was in use in both may be garbage later: so all are looked at again now and then, as
    often as a time allows that is proportional to the batch boundaries.

    Args:
        meter: one that knows its blocks.
        mark: the moment of the meter at which the region began.
        census: begun at the begin of the region.
        freed_with: returns what is freed with garbage.
        look: called with the garbage whenever some is found that keeps memory alive, and with the
            numbers of the allocations that are garbage.
    """

    def __init__(
        self,
        meter: Meter,
        mark: Any,
        census: CompiledCensus,
        freed_with: "Callable[..., Freed]",
        look: Look,
    ) -> None:
        self._meter, self._mark, self._census = meter, mark, census
        self._freed_with, self._look = freed_with, look
        self.leave_out(_Block)
        self._blocks: dict[int, _Block] = {}
        """By the number of the allocation, what was found."""
        self._is_own: dict[Any, bool] = {}
        """Whether a device of torch is that of the meter."""
        self._known = Garbage()
        self._collected = -1
        """How many objects had been collected when `_blocks` were last seen to be live."""
        self._cost_of_all = 0
        """What it has cost to look at all objects of the region, and would again."""
        self._cost = 0
        """That of all such counts."""
        self._waiting: list[_Waiting] = []
        """Garbage with objects that wait, until any object is collected."""
        self._nodes: set[int] = set()
        """Addresses of autograd nodes that were freed with garbage, and are garbage themselves."""
        self._counts = 0
        self._has_lost = False
        """Whether some of it was forgotten since all objects were looked at."""
        self._followed_until = 0
        """The number of boundaries when all of it was last followed."""
        self._seen_at = 0
        """How many objects had been collected then."""
        self._is_later = False
        """Whether there was a count before."""
        self._serial_before = 0
        """The number of allocations at the last count, if it did not look at all objects."""
        self._all_until = 0
        """The number of boundaries when all were last looked at,"""
        self._counted_at = 0
        """and at the last count."""
        self._missed_since: int | None = None
        self._new: list[_Block] = []
        """What the last count has found anew."""

    def known(self, *, is_collecting: bool = False) -> Garbage:
        collected = collected_objects() if self._blocks else self._collected
        # Garbage that was not collected is still there.
        if is_collecting or collected != self._collected:
            self._collected = collected
            blocks = self._blocks.values()
            self._blocks, self._known = {}, Garbage()
            self._add_blocks(filter(self._is_live, blocks))
        return self._known

    def count(self, boundaries: int, *, of_all: bool = False) -> Garbage | None:
        # A collection would change what is garbage, and what this references would survive it.
        is_complete = without_collections(lambda: self._count(boundaries, of_all))
        return self._known if is_complete else None

    def _count(self, boundaries: int, of_all: bool) -> bool:
        """Add what garbage keeps alive to what is known; return whether that is all."""
        if not self._is_later:
            self._census.look_back(_MOST_BEFORE)
        allowed = _AT_FIRST + _PER_BOUNDARY * boundaries - self._cost
        is_all = of_all or not self._is_later or self._cost_of_all <= allowed
        # Garbage of the last count is followed once more in any case.
        older = [it for it in self._waiting if it.found_at < self._counts]
        followed_until = self._followed_until
        # Collections have freed what waited, and with it the knowledge since when it was garbage.
        is_forgotten = bool(older) and collected_objects() != self._seen_at
        is_forgotten &= followed_until < self._counted_at
        allowed -= self._cost_of_all + sum(it.cost for it in older)
        follows_all = is_all and (of_all or allowed >= 0)
        garbage, blocks, late = self._unreachable(BEGIN if is_all else LATER, follows_all)
        self._census.advance()
        self._is_later = True
        if blocks is None:
            return False
        self.known()  # forgets what was freed since
        new = self._new = [block for block in blocks if block.serial not in self._blocks]
        has_missed = is_all and any(it.serial <= self._serial_before for it in new)
        missed_since = [self._all_until] if has_missed else []
        if is_forgotten or any(it.serial in late for it in new):
            missed_since.append(followed_until)
        self._missed_since = min(missed_since, default=None)
        self._serial_before = 0 if is_all else self._meter.serial()
        self._all_until = boundaries if is_all else self._all_until
        self._counted_at = boundaries
        if follows_all or not (older or self._has_lost):
            self._followed_until = boundaries
        self._add_blocks(new)
        if blocks:
            self._look(garbage, self._blocks.keys())
        return True

    def found_before(self, serial: int) -> int | None:
        return sum(it.requested_bytes for it in self._new if it.serial <= serial)

    def leave_out(self, kind: type) -> None:
        self._census.leave_out(kind)

    def is_quick(self) -> bool:
        return self._census.is_small(_MOST_BEFORE)

    def older(self, generation: int = OLDEST) -> list[OlderGarbage] | None:
        return without_collections(lambda: self._older(generation))

    def _older(self, generation: int) -> list[OlderGarbage] | None:
        counted, of_region, _ = self._counted()
        everything, _ = self._census.unreachable(up_to(generation))
        older = [value for value in everything if id(value) not in of_region]
        is_complete = True

        def blocks_of(garbage: list[Any]) -> list[_Block]:
            nonlocal is_complete
            freed = self._freed_with(garbage)
            is_complete &= freed.is_complete
            return [
                block for block in self._blocks_of(freed.storages) if block.serial not in counted
            ]

        blocks = blocks_of(older)
        if not is_complete:
            return None
        groups = _connected(older) if blocks else []
        parts = [blocks_of(group) for group in groups] if len(groups) <= _MOST_GROUPS else []
        in_groups = {block.serial for part in parts for block in part}
        # Views in several groups keep a block that none of them would free alone.
        parts += [[block] for block in blocks if block.serial not in in_groups]
        return [
            OlderGarbage(sum(it.requested_bytes for it in part), max(it.serial for it in part))
            for part in parts
            if part
        ]

    def collect_older(self) -> list[OlderGarbage]:
        counted, of_region, all_counted = self._counted()
        older = [it for it in self._census.unreachable(up_to(OLDEST))[0] if id(it) not in of_region]
        groups = sum(map(self._may_keep_memory, _connected(older))) + (not all_counted)
        del older  # it references them, so they would survive the collection
        before = self._meter.allocations_since(self._mark)
        live = [allocation for allocation in before if allocation.serial not in counted]
        gc.collect()
        freed = [OlderGarbage(it.bytes, it.serial) for it in live if not it.is_live()]
        if groups == 1 and freed:  # of several, it is not known which has kept what
            last_serial = max(it.last_serial for it in freed)
            return [OlderGarbage(sum(it.requested_bytes for it in freed), last_serial)]
        return freed

    def _may_keep_memory(self, garbage: list[Any]) -> bool:
        freed = self._freed_with(garbage)
        return bool(freed.storages) or not freed.is_complete

    def _counted(self) -> tuple[set[int], set[int], bool]:
        """Return which allocations garbage of the region keeps alive, and which objects it is.

        The objects by their identities: a census does not count as garbage what a list references.
        The last says whether these are all such allocations.
        """
        young, _ = self._census.unreachable(BEGIN)
        freed = self._freed_with(young)
        counted = {block.serial for block in self._blocks_of(freed.storages)} | self._blocks.keys()
        return counted, set(map(id, young)), freed.is_complete

    def has_left_out(self) -> bool:
        return min(self._all_until, self._followed_until) < self._counted_at

    def missed_at_end(self) -> int | None:
        return without_collections(self._missed_at_end) if self.has_left_out() else None

    def _missed_at_end(self) -> int | None:
        _, blocks, late = self._unreachable(BEGIN, follows_all=True)
        known_until = min(self._all_until, self._followed_until)
        if blocks is None:
            return known_until
        new = [block for block in blocks if block.serial not in self._blocks]
        is_missed = any(it.serial <= self._serial_before or it.serial in late for it in new)
        return known_until if is_missed else None

    def missed_since(self) -> int | None:
        return self._missed_since

    def _unreachable(
        self, since: int, follows_all: bool
    ) -> tuple[list[Any], list[_Block] | None, Collection[int]]:
        """Return the garbage, and blocks that it keeps alive; None if they are not all known.

        The last are the numbers of blocks that may have been garbage at earlier counts already. Of
        the garbage, that is followed which is new, or waits since the last count, or for the same
        objects as these; with `follows_all` all that waits.
        """
        collected = collected_objects()
        # Other objects may have got the same identities. If other threads leave cycles, this is at
        # each count. It then follows again what is still there, in the time that is allowed.
        if collected != self._seen_at:
            self._census.forget()
            self._seen_at = collected
            self._has_lost |= bool(self._waiting)
            self._waiting, self._nodes = [], set()
        new: list[Any] = []
        garbage, cost_again = self._census.unreachable(since, new)
        self._has_lost &= since != BEGIN
        freed = self._freed_with(new, self._nodes)
        self._nodes |= freed.nodes
        cost_of_new, waiting = _cost_of(freed), freed.waiting
        cost = cost_again + cost_of_new  # what is followed is not new again
        late: Collection[int] = ()
        self._counts += 1
        if self._waiting:
            # Those of which all objects are listed: if `since` is later, older ones are not.
            listed = frozenset(map(id, garbage))
            earlier = [it for it in self._waiting if it.garbage <= listed]
            last = [it for it in earlier if it.found_at == self._counts - 1]
            if last:
                del freed  # its storages would count as in use
                freed = self._follow(new, garbage, last)
                cost += _cost_of(freed)
            if not follows_all:
                now = freed.waiting
                earlier = [it for it in earlier if it in last or not it.waiting.isdisjoint(now)]
            if len(earlier) > len(last):
                before = {block.serial for block in self._blocks_of(freed.storages)}
                del freed
                freed = self._follow(new, garbage, earlier)
                cost += _cost_of(freed)
                if self._followed_until < self._counted_at:
                    late = {block.serial for block in self._blocks_of(freed.storages)} - before
            waiting &= freed.waiting
            self._waiting = [
                it._replace(waiting=it.waiting & freed.waiting) if it in earlier else it
                for it in self._waiting
                if it not in earlier or not it.waiting.isdisjoint(freed.waiting)
            ]
        if waiting:
            idents = frozenset(map(id, new))
            self._waiting.append(_Waiting(idents, waiting, cost_of_new, self._counts))
        if since == BEGIN:
            self._cost_of_all = cost_again
            self._cost += cost - _TIMES_AGAIN * cost_of_new
        return garbage, self._blocks_of(freed.storages) if freed.is_complete else None, late

    def _follow(
        self, new: list[Any], garbage: list[Any], groups: "Collection[_Waiting]"
    ) -> "Freed":
        """Return what is freed with new garbage and that of some groups."""
        idents = frozenset[int]().union(*(it.garbage for it in groups))
        again = [value for value in garbage if id(value) in idents] if idents else []
        return self._freed_with(new + again)

    def _blocks_of(self, storages: Iterable[Any]) -> list[_Block]:
        blocks = []
        for storage in storages:
            size, device = storage.nbytes(), storage.device
            if device not in self._is_own:  # its text takes longer than all else
                self._is_own[device] = str(device) == self._meter.torch_device
            if not size or not self._is_own[device]:
                continue
            address = storage.data_ptr()
            block = self._meter.block_at(address)
            if block is not None:
                # Of lent memory, a block is the part that no older window covers.
                blocks.append(_Block(address, block[1], block[0], min(size, block[0])))
        return blocks

    def _add_blocks(self, blocks: Iterable[_Block]) -> None:
        allocated_bytes, requested_bytes = self._known
        for block in blocks:
            if block.serial in self._blocks:
                continue
            self._blocks[block.serial] = block
            allocated_bytes += block.allocated_bytes
            requested_bytes += block.requested_bytes
        self._known = Garbage(allocated_bytes, requested_bytes)

    def _is_live(self, block: _Block) -> bool:
        block_there = self._meter.block_at(block.address)
        return block_there is not None and block_there[1] == block.serial


def _cost_of(freed: "Freed") -> int:
    return _PER_FOLLOWED * freed.followed + _PER_ASKED * freed.asked


class Beginning:
    """The moment at which a region has begun, from which its garbage can be counted.

    What counts it is made when it is first needed: that takes longer than most regions, which have
    no batch boundary.

    Args:
        meter: that of the region.
        mark: its moment of the meter.
        look: see :class:`Census`.
    """

    def __init__(self, meter: Meter, mark: Any, look: Look) -> None:
        self._made_of = meter, mark, look
        self._own = meter.garbage_counter()
        self._compiled: CompiledCensus | None = None
        if self._own is None and meter.knows_blocks:
            from pytest_cka_memory.meters import release  # imports torch; not at the first boundary

            self._freed_with = release.freed_with
            self._compiled = CompiledCensus.begin()

    @cached_property
    def census(self) -> GarbageCounter | None:
        """What counts the garbage; None if it cannot be counted here."""
        if self._compiled is None:
            return self._own
        meter, mark, look = self._made_of
        return Census(meter, mark, self._compiled, self._freed_with, look)

    def end(self) -> None:
        """Take note that the region ends."""
        if self._compiled is not None:
            self._compiled.remember_now()
        elif self._own is not None:
            self._own.end()


def _connected(objects: list[Any]) -> list[list[Any]]:
    """Return objects in groups that have no references between each other."""
    group = {id(value): [value] for value in objects}
    for value in objects:
        for referenced in gc.get_referents(value):
            own, other = group[id(value)], group.get(id(referenced))
            if other is not None and other is not own:
                small, large = sorted((own, other), key=len)
                large += small
                group.update((id(member), large) for member in small)
    return list({id(members): members for members in group.values()}.values())
