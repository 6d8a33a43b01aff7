"""Loops whose tensors are in reference cycles, and their true growth: a collection per batch."""

import gc
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pytest_cka_memory import MemoryProbe

WAYS = ("batch_done", "batches", "break")


class Cycle:
    """An object in a reference cycle, which only the garbage collector frees."""

    def __init__(self, value: Any) -> None:
        self.me = self
        self.value = value


class Part:
    """Something that a loop does in each batch; its attributes are dropped after the loop."""

    def __init__(self, choose: random.Random, batches: int, device: str) -> None:
        self.make = partial(torch.empty, choose.randrange(1, 40) * 128, device=device)
        self.first = choose.choice((0, 0, 0, choose.randrange(batches)))
        """The first batch in which it does anything."""

    def run(self, batch: int) -> None:
        """Run one batch."""


class Keeps(Part):
    """Keeps a tensor per batch in a cycle, and drops all of them in one batch or after the loop."""

    def __init__(self, choose: random.Random, batches: int, device: str) -> None:
        super().__init__(choose, batches, device)
        self.dropped = choose.choice((None, None, choose.randrange(1, batches + 1)))
        self.kept: Cycle | None = Cycle([])

    def run(self, batch: int) -> None:
        if batch == self.dropped:
            self.kept = None
        if batch >= self.first and self.kept is not None:
            self.kept.value.append(self.make())


class Replaces(Part):
    """Keeps a tensor per batch in a cycle, and takes a new cycle every few batches."""

    def __init__(self, choose: random.Random, batches: int, device: str) -> None:
        super().__init__(choose, batches, device)
        self.period, self.at_end = choose.randrange(2, 16), choose.random() < 0.5
        self.kept = Cycle([])

    def run(self, batch: int) -> None:
        if batch % self.period == 0 and not self.at_end:
            self.kept = Cycle([])
        self.kept.value.append(self.make())
        if batch % self.period == self.period - 1 and self.at_end:
            self.kept = Cycle([])


class LeavesGarbage(Part):
    """Makes a tensor in a cycle in each batch, or every few, and drops it then or in the next."""

    def __init__(self, choose: random.Random, batches: int, device: str) -> None:
        super().__init__(choose, batches, device)
        self.every, self.keeps_last = choose.choice((1, 1, 2, 3)), choose.random() < 0.5
        self.last: Cycle | None = None

    def run(self, batch: int) -> None:
        if batch >= self.first and batch % self.every == 0:
            made = Cycle(self.make())
            self.last = made if self.keeps_last else None


class Buffers(Part):
    """Keeps the tensors of the last few batches, each in a cycle."""

    def __init__(self, choose: random.Random, batches: int, device: str) -> None:
        super().__init__(choose, batches, device)
        self.buffer: deque[Cycle] = deque(maxlen=choose.randrange(2, batches))

    def run(self, batch: int) -> None:
        self.buffer.append(Cycle(self.make()))


class Flat(Part):
    """Keeps the tensor of the last batch."""

    def run(self, batch: int) -> None:
        self.last = self.make()


class Collects(Part):
    """Collects garbage at random moments, as the collector does by itself."""

    def __init__(self, choose: random.Random) -> None:
        self._choose, self._share = choose, choose.choice((0, 0.02, 0.1, 0.3))

    def run(self, batch: int) -> None:
        if self._choose.random() < self._share:
            gc.collect(self._choose.randrange(3))


class FillsThenDrops(Part):
    """Keeps the tensors of its first few batches in a cycle, which it drops some batches later."""

    def __init__(self, choose: random.Random, batches: int, device: str) -> None:
        super().__init__(choose, batches, device)
        self.full, self.dropped = sorted(choose.randrange(batches + 1) for _ in range(2))
        self.kept: Cycle | None = Cycle([])

    def run(self, batch: int) -> None:
        if batch == self.dropped:
            self.kept = None
        if self.kept is not None and batch < self.full:
            self.kept.value.append(self.make())


class LeavesViews(Part):
    """Leaves views in cycles of tensors that it keeps itself for some batches more."""

    def __init__(self, choose: random.Random, batches: int, device: str) -> None:
        super().__init__(choose, batches, device)
        self.held: deque[torch.Tensor] = deque(maxlen=choose.randrange(1, 5))
        self.every, self.count = choose.randrange(1, 4), choose.randrange(1, 3)
        self.detaches = choose.random() < 0.3
        self.dropped = choose.randrange(batches + 1)

    def run(self, batch: int) -> None:
        if batch % self.every == 0:
            tensor = self.make()
            self.held.append(tensor)
            for _ in range(self.count):
                Cycle([tensor.detach() if self.detaches else tensor.view(-1)])
        if batch == self.dropped:
            self.held.clear()


KINDS = (Keeps, Keeps, Replaces, LeavesGarbage, LeavesGarbage, Buffers, Flat)
OWNERS = (*KINDS, FillsThenDrops, FillsThenDrops, FillsThenDrops)


def random_parts(
    seed: int, batches: int, device: str, kinds: Sequence[type[Part]] = KINDS
) -> list[Part]:
    """Return one to three parts that `seed` chooses."""
    choose = random.Random(seed)
    chosen = [choose.choice(kinds) for _ in range(choose.randrange(1, 4))]
    return [kind(choose, batches, device) for kind in chosen]


def parts_and_collections(
    seed: int, batches: int, device: str, kinds: Sequence[type[Part]] = KINDS
) -> list[Part]:
    """Return the same parts, and collections before, between or after them."""
    choose, parts = random.Random(~seed), random_parts(seed, batches, device, kinds)
    parts.insert(choose.randrange(len(parts) + 1), Collects(choose))
    return parts


def growth(
    probe: "MemoryProbe",
    make_parts: Callable[[], Iterable[Part]],
    batches: int,
    way: str,
    *,
    is_made_inside: bool = True,
    collects: bool = False,
) -> float | None:
    """Return the growth per batch of :func:`looped`.

    With `collects` whatever is live at a boundary is in use, so that the growth is true.
    """
    region = looped(
        *(probe, make_parts, batches, way), is_made_inside=is_made_inside, collects=collects
    )
    if collects:
        # Not above: planted loops run these programs without the plugin, too.
        from pytest_cka_memory.core.retention import growth_bytes_per_batch

        return growth_bytes_per_batch(
            [
                replace(it, garbage_bytes=0, may_have_garbage=False, uncertain_bytes=0)
                for it in region.timeline
            ]
        )
    found: float | None = region.growth_bytes_per_batch
    return found


def looped(
    probe: "MemoryProbe",
    make_parts: Callable[[], Iterable[Part]],
    batches: int,
    way: str,
    *,
    is_made_inside: bool = True,
    collects: bool = False,
) -> Any:
    """Return the region of a loop over parts, which go out of scope inside the region.

    Args:
        probe: measures the region.
        make_parts: makes the parts, in a function inside the region or before it.
        batches: how many there are.
        way: one of `WAYS`.
        is_made_inside: whether the parts are made inside the region.
        collects: whether to collect all garbage before each boundary, so that the growth is true.
    """
    made = None if is_made_inside else list(make_parts())

    def run_batch(parts: list[Part], batch: int) -> None:
        for part in parts:
            part.run(batch)
        if collects:
            gc.collect()

    def loop(region: Any, parts: list[Part]) -> None:
        if way == "batch_done":
            for batch in range(batches):
                run_batch(parts, batch)
                region.batch_done(1)
            return
        for (batch,) in region.batches(_loader(batches + 3 * (way == "break"))):
            if batch == batches:
                break
            run_batch(parts, batch)

    with probe.measure() as region:
        loop(region, list(make_parts()) if made is None else made)
        made = None
    return region


def _loader(batches: int) -> Iterator[list[int]]:
    yield from ([batch] for batch in range(batches))


def check_random_loops(
    probe: "MemoryProbe",
    device: str,
    seeds: Iterable[int],
    kinds: Sequence[type[Part]] = KINDS,
    *,
    are_older: bool | None = None,
) -> None:
    """Compare the growth of random loops with the truth, to the byte, where that is not negative.

    Every second loop also collects at random moments. The parts of every fourth are older than the
    region, or with `are_older` all or none.

    If it is not known at which boundaries something was garbage, the growth is the smallest that is
    possible, and the samples say so: the true growth is between that and the highest that they
    allow.
    """
    from pytest_cka_memory.core.retention import highest_growth_bytes_per_batch

    for seed in seeds:
        batches, way = 5 + seed % 36, WAYS[seed % 3]
        is_older = seed % 4 == 0 if are_older is None else are_older
        with_collections = parts_and_collections if seed // 4 % 2 else random_parts
        make = partial(with_collections, seed, batches, device, kinds)
        region = looped(probe, make, batches, way, is_made_inside=not is_older)
        make = partial(random_parts, seed, batches, device, kinds)
        true = growth(probe, make, batches, way, is_made_inside=not is_older, collects=True)
        found, highest = (
            None if it is None else max(0, it)
            for it in (
                region.growth_bytes_per_batch,
                highest_growth_bytes_per_batch(region.timeline),
            )
        )
        true = None if true is None else max(0, true)
        where = f"seed {seed}: {batches} batches, {way}: {found}, truly {true}, at most {highest}"
        if found == true:
            continue
        assert None not in (found, true, highest), where
        assert found < true <= highest, where
        assert any(sample.uncertain_bytes for sample in region.timeline), where


class KeepsOne(Part):
    """Keeps 4096 bytes per batch in a cycle."""

    def __init__(self, device: str) -> None:
        self.me = self
        self.make = partial(torch.empty, 1024, device=device)
        self.kept: list[torch.Tensor] = []

    def run(self, batch: int) -> None:
        self.kept.append(self.make())


class LeavesOne(KeepsOne):
    """Leaves 4096 bytes of garbage per batch, or keeps them until the next."""

    def __init__(self, device: str, *, keeps_last: bool) -> None:
        super().__init__(device)
        self.keeps_last = keeps_last

    def run(self, batch: int) -> None:
        self.last = Cycle(self.make())
        if not self.keeps_last:
            del self.last
