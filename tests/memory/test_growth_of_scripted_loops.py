"""Growth of long loops that leave garbage in cycles, on a scripted meter and a scripted collector.

No torch is involved, so 2,000 loops of 41 to 197 batches take a few seconds.
"""

import random
from collections.abc import Callable, Sequence

import pytest

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.core.retention import growth_bytes_per_batch, highest_growth_bytes_per_batch
from pytest_cka_memory.measure import batch_samples
from pytest_cka_memory.measure.region import Region
from pytest_cka_memory.meters.base import Garbage, GarbageCounter
from pytest_cka_memory.testing import ScriptedMeter


class Memory(ScriptedMeter):
    """A scripted meter with blocks that only a collection frees."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = 0
        self.is_counted = True
        self._garbage: dict[int, int] = {}

    def drop(self, block: int, *, is_in_cycle: bool) -> None:
        """Drop the last reference from outside to a block, which may be in a cycle."""
        if is_in_cycle:
            self._garbage[block] = self._blocks[block]
        else:
            self.free(block)

    def collect(self) -> None:
        while self._garbage:
            block, _ = self._garbage.popitem()
            self.free(block)

    def garbage_counter(self) -> GarbageCounter | None:
        return ScriptedCount(self) if self.is_counted else None


class ScriptedCount(GarbageCounter):
    """Counts the garbage of a scripted memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._found: set[int] = set()

    def known(self, *, is_collecting: bool = False) -> Garbage:
        known = sum(self._memory._garbage.get(block, 0) for block in self._found)
        return Garbage(known, known)

    def count(self, boundaries: int, *, of_all: bool = False) -> Garbage:
        self._memory.counts += 1
        self._found = set(self._memory._garbage)
        return self.known()

    def is_quick(self) -> bool:
        return True

    def leave_out(self, kind: type) -> None:
        pass


LOOPS = 340
"""Of each kind, for each way in which garbage is found: about 2,000 in all."""
IN_A_TEST = 20


@pytest.fixture(params=["counted", "collected"])
def new_memory(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Memory]:
    """Return scripted memories whose garbage batch boundaries count, or collect and count."""

    def new_memory() -> Memory:
        memory = Memory()
        memory.is_counted = request.param == "counted"

        def collected() -> None:
            memory.counts += 1
            memory.collect()

        monkeypatch.setattr(batch_samples, "collect", collected)
        return memory

    return new_memory


@pytest.fixture
def memory(new_memory: Callable[[], Memory]) -> Memory:
    """Return one of these memories."""
    return new_memory()


class Part:
    """Allocates a block in each `period`-th batch and keeps it for the next `kept` batches.

    Args:
        choose: chooses the size of the blocks, and whether they are in cycles and are dropped
            before the next is allocated or after it.
        kept: for how many batches a block is live; None for all.
        period: a block is allocated after so many batches,
        phase: the first one in the batch of this number.
    """

    def __init__(
        self, choose: random.Random, kept: int | None, period: int = 1, phase: int = 0
    ) -> None:
        self.size = choose.choice((4, 128 * choose.randrange(1, 40)))
        self.is_in_cycle, self._drops_first = choose.random() < 0.7, choose.random() < 0.5
        self._kept, self._period, self._phase = kept, period, phase
        self._blocks: list[tuple[int, int]] = []

    def run(self, memory: Memory, batch: int) -> None:
        """Run one batch."""
        if self._drops_first:
            self._drop_old(memory, batch)
        if batch % self._period == self._phase:
            self._blocks.append((batch, memory.allocate(self.size)))
        self._drop_old(memory, batch, without_this=self._drops_first)

    def drop_all(self, memory: Memory) -> None:
        """Go out of scope."""
        for _, block in self._blocks:
            memory.drop(block, is_in_cycle=self.is_in_cycle)

    def _drop_old(self, memory: Memory, batch: int, *, without_this: bool = False) -> None:
        if self._kept is None or (without_this and self._kept):
            return
        while self._blocks and self._blocks[0][0] + self._kept <= batch:
            memory.drop(self._blocks.pop(0)[1], is_in_cycle=self.is_in_cycle)


def run(memory: Memory, parts: Sequence[Part], count: int, choose: random.Random) -> Region:
    """Run a loop over parts. `choose` chooses its form and when Python collects by itself."""
    automatic = choose.choice((0, 0, 0.02, 0.1, 0.3))
    way = choose.choice(("batch_done", "batches", "break"))

    def run_batch(batch: int) -> None:
        collected_before = choose.randrange(len(parts)) if choose.random() < automatic else None
        for place, part in enumerate(parts):
            if place == collected_before:
                memory.collect()
            part.run(memory, batch)

    with MemoryProbe(meter=memory).measure() as region:
        if way == "batch_done":
            for batch in range(count):
                run_batch(batch)
                region.batch_done(1)
        else:
            for (batch,) in region.batches([[batch] for batch in range(count + (way == "break"))]):
                if batch == count:
                    break
                run_batch(batch)
        if choose.random() < 0.5:
            for part in parts:
                part.drop_all(memory)
    return region


def regular_parts(choose: random.Random) -> list[Part]:
    """Return parts that do the same in each batch."""
    kept = (0, 1, choose.randrange(12))
    return [Part(choose, choose.choice(kept)) for _ in range(choose.randrange(1, 4))]


def alternating_parts(choose: random.Random) -> list[Part]:
    """Return parts that do the same every few batches, as if gradients were accumulated."""
    period = choose.choice((2, 2, 3, 4, 8))
    parts = [
        Part(choose, choose.randrange(period + 1), period, choose.randrange(period))
        for _ in range(choose.randrange(1, 4))
    ]
    return [*parts, Part(choose, 0)]


@pytest.mark.parametrize("make_parts", [regular_parts, alternating_parts])
@pytest.mark.parametrize("first", range(0, LOOPS, IN_A_TEST))
def test_clean_loop_does_not_grow(
    new_memory: Callable[[], Memory],
    make_parts: Callable[[random.Random], list[Part]],
    first: int,
) -> None:
    """Whatever it leaves in cycles, and whenever Python collects some of that."""
    for seed in range(first, first + IN_A_TEST):
        choose = random.Random(seed)
        region = run(new_memory(), make_parts(choose), choose.randrange(41, 198), choose)
        growth = region.growth_bytes_per_batch
        assert growth is not None
        # The level may be found to fall if few of the highest samples are checked, or if it is not
        # known whether something was garbage at a boundary that was not checked.
        is_known = not any(sample.uncertain_bytes for sample in region.timeline)
        is_flat = growth == 0 if make_parts is regular_parts and is_known else growth <= 0
        is_flat &= (highest_growth_bytes_per_batch(region.timeline) or 0) >= growth
        assert is_flat, f"seed {seed} grows by {growth}"


@pytest.mark.parametrize("first", range(0, LOOPS, IN_A_TEST))
def test_leak_beside_garbage_is_exact(new_memory: Callable[[], Memory], first: int) -> None:
    """Also if what leaks goes out of scope before the region ends."""
    for seed in range(first, first + IN_A_TEST):
        choose = random.Random(seed)
        leak = Part(choose, kept=None)
        parts = [*regular_parts(choose), leak]
        choose.shuffle(parts)
        region = run(new_memory(), parts, choose.randrange(41, 198), choose)
        assert region.growth_bytes_per_batch == leak.size, f"seed {seed}"


@pytest.mark.parametrize("count", [55, 60, 75, 100, 160])
def test_leak_beside_garbage_is_exact_after_a_long_warm_up(memory: Memory, count: int) -> None:
    """If the second half of the judged batches was not checked, those up to the last check are."""
    choose = random.Random(count)
    leak, garbage = Part(choose, kept=None), Part(choose, kept=0)
    garbage.is_in_cycle = True
    with MemoryProbe(meter=memory).measure() as region:
        for batch in range(count):
            leak.run(memory, batch)
            garbage.run(memory, batch)
            region.batch_done()
    assert growth_bytes_per_batch(region.timeline, warmup=20) == leak.size


def test_garbage_that_begins_late_is_no_growth(memory: Memory) -> None:
    """A flat loop has not used the checks of its first batches, so they are left for later."""
    with MemoryProbe(meter=memory).measure() as region:
        for batch in range(150):
            block = memory.allocate(100)
            memory.drop(block, is_in_cycle=batch >= 100)
            region.batch_done()
    assert region.growth_bytes_per_batch == 0
    assert {sample.in_use_bytes for sample in region.timeline} == {0}


def test_irregular_growth_without_garbage_is_computed_from_all_samples(memory: Memory) -> None:
    """A step in the last batches, which are not checked, is growth as in a short loop."""
    with MemoryProbe(meter=memory).measure() as region:
        for batch in range(66):
            memory.allocate(3200 if batch == 60 else 1)
            region.batch_done()
    assert region.growth_bytes_per_batch == 1 + (3200 - 1) / 32
    assert not any(sample.may_have_garbage for sample in region.timeline)


def test_samples_that_were_not_checked_say_so(memory: Memory) -> None:
    """The first 40 are checked, then fewer and fewer; a sample is never below what was live."""
    with MemoryProbe(meter=memory).measure() as region:
        for _ in range(120):
            memory.drop(memory.allocate(100), is_in_cycle=True)
            region.batch_done()
    checked = [sample.batch for sample in region.timeline if not sample.may_have_garbage]
    assert checked == [*range(1, 41), 66, 110]
    # Where checks collect, the garbage of the second may have been in use at the first boundary.
    unknown_bytes = 0 if memory.is_counted else 100
    assert [sample.uncertain_bytes for sample in region.timeline] == [-unknown_bytes] + [0] * 119
    assert [sample.in_use_bytes for sample in region.timeline] == [unknown_bytes] + [0] * 119


@pytest.mark.parametrize(
    ("rise", "leaves_garbage", "checks"),
    [(0, False, 0), (4, False, 46), (4, True, 46), (0, True, 46)],
    ids=["flat", "leak", "leak-and-garbage", "garbage"],
)
def test_number_of_checks_is_small(
    memory: Memory, rise: int, leaves_garbage: bool, checks: int
) -> None:
    """2,000 batches are checked 46 times at most, and never if the level does not rise.

    To count garbage is cheap enough to do so at the first boundary as well.
    """
    kept = memory.allocate(4)
    with MemoryProbe(meter=memory).measure() as region:
        for batch in range(2_000):
            memory.free(kept)
            kept = memory.allocate(4 + rise * batch)
            memory.drop(memory.allocate(1), is_in_cycle=leaves_garbage)
            region.batch_done()
    assert memory.counts == checks + (memory.is_counted and leaves_garbage)
    assert region.growth_bytes_per_batch == rise
