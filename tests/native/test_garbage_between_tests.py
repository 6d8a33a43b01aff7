"""Which collections the garbage between two tests needs: a full one only if it may be old."""

import gc
from collections.abc import Callable, Iterator

import pytest

from pytest_cka_memory.meters.collector import Garbage

KEPT = 7


class Memory:
    """A level that a test sets, and the full collections that were made."""

    def __init__(self) -> None:
        self.level = 0
        self.full_collections = 0
        self.at_next_collection: Callable[[], None] | None = None
        self.seconds = 0.0
        self.dropped = 0
        """What is live of the objects that a fixture has dropped."""
        self.garbage = Garbage(
            lambda: self.level, lambda since, until: self.dropped, lambda: self.seconds
        )

    def run_test(
        self, *, fixture_bytes: int, keeps: int = 0, thorough: bool = True, promotes: bool = False
    ) -> bool:
        """Set up fixtures, open and end a region, tear the fixtures down; `keeps` stays live.

        Returns whether all garbage had been collected. With `promotes`, objects become old in it.
        """
        self.garbage.note_quiet_moment()
        self.level += fixture_bytes
        self.garbage.collect_before(thorough=thorough)
        self.level += keeps
        if promotes:
            gc.collect(1)
        is_clean = self.garbage.collect_after(lambda: keeps, thorough=thorough)
        gc.collect(1)  # one of those that allocating objects causes: what is live becomes old
        self.level -= fixture_bytes
        return is_clean

    def after_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self.full_collections += info["generation"] == 2
            self.seconds += 1.0 if info["generation"] == 2 else 0.0
            if self.at_next_collection is not None:
                self.at_next_collection()
                self.at_next_collection = None


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    gc.disable()  # otherwise a collection may begin by chance
    gc.callbacks.append(memory.after_collection)
    yield memory
    gc.callbacks.remove(memory.after_collection)
    gc.enable()


def test_fixtures_of_several_sizes_need_no_full_collection(memory: Memory) -> None:
    """What a test allocates is gone before the next, so fixtures of any sizes leave no garbage."""
    for size in (10, 30, 20):
        memory.run_test(fixture_bytes=size)
    assert memory.full_collections == 0


def test_fixtures_that_become_old_need_one_full_collection_if_their_size_stays(
    memory: Memory,
) -> None:
    """Fixtures of one size in each test need one full collection only, in which they became old."""
    for _ in range(3):
        memory.garbage.note_quiet_moment()
        memory.level += 10
        gc.collect(1)
        memory.garbage.collect_before()
        memory.level -= 10
    assert memory.full_collections == 1


def test_freeing_what_a_test_kept_spares_the_next_test_a_full_collection(memory: Memory) -> None:
    """What a test kept and then freed, as a unittest attribute, needs no second full collection."""
    memory.run_test(fixture_bytes=10, keeps=KEPT)
    assert memory.full_collections == 1  # at the end of its region
    memory.level -= KEPT
    memory.run_test(fixture_bytes=30)
    assert memory.full_collections == 1


def test_what_a_test_kept_and_did_not_free_is_collected_before_the_next(memory: Memory) -> None:
    """Memory that a test kept and did not free may be old garbage, so it is collected."""
    memory.run_test(fixture_bytes=10, keeps=KEPT)
    memory.run_test(fixture_bytes=30)
    assert memory.full_collections == 2


def test_old_garbage_that_a_test_left_is_collected_before_the_next(memory: Memory) -> None:
    """Memory that an earlier test left is not taken for a fixture of the next, but collected."""
    memory.run_test(fixture_bytes=10)
    memory.level += KEPT  # freed in the teardown of a fixture, by a cycle that is old
    memory.run_test(fixture_bytes=30)
    assert memory.full_collections == 1


def test_level_between_tests_is_known_again_after_garbage_was_found(memory: Memory) -> None:
    """After garbage was collected, the level between tests is the noted one less that garbage."""
    memory.run_test(fixture_bytes=10)
    memory.level += KEPT
    memory.at_next_collection = lambda: setattr(memory, "level", memory.level - KEPT)
    memory.run_test(fixture_bytes=10)
    memory.run_test(fixture_bytes=30)
    assert memory.full_collections == 0


def test_objects_of_a_fixture_are_collected_before_the_next_region(memory: Memory) -> None:
    """Old objects of a fixture are collected before the next
    region, though the level is the same.
    """
    memory.run_test(fixture_bytes=10)
    memory.dropped = 10
    memory.garbage.suspect(0, 1)
    memory.run_test(fixture_bytes=10)
    assert memory.full_collections == 1


def test_objects_of_a_fixture_that_are_freed_need_no_full_collection(memory: Memory) -> None:
    """Objects of a fixture that are freed early, or by a young collection, need no full one."""
    for freed in (True, False):
        memory.run_test(fixture_bytes=10)
        memory.dropped = 10
        memory.garbage.suspect(0, 1)
        if freed:
            memory.dropped = 0
        memory.at_next_collection = lambda: setattr(memory, "dropped", 0)
        memory.run_test(fixture_bytes=10)
    assert memory.full_collections == 0


def kept_by_each_of_three_tests(memory: Memory, **how: bool) -> list[bool]:
    """Return whether all garbage was collected for each; the last two run without limits."""
    memory.seconds = 10.0  # of which a full collection takes one
    first = memory.run_test(fixture_bytes=10, keeps=KEPT)
    memory.level -= KEPT
    others = []
    for _ in range(2):
        others.append(memory.run_test(fixture_bytes=10, keeps=KEPT, thorough=False, **how))
        memory.level -= KEPT
    return [first, *others]


def test_region_without_limits_gets_no_full_collection_above_its_share_of_the_time(
    memory: Memory,
) -> None:
    """Regions without limits get full collections only within a share of the time."""
    assert kept_by_each_of_three_tests(memory, promotes=True) == [True, False, False]
    assert memory.full_collections == 1


def test_region_without_limits_gets_a_full_collection_within_the_share(memory: Memory) -> None:
    """When the process has run for longer, a region without limits gets a full collection again."""
    kept_by_each_of_three_tests(memory, promotes=True)
    memory.seconds = 39.0  # of which two collections would be more than the share
    assert not memory.run_test(fixture_bytes=10, keeps=KEPT, thorough=False, promotes=True)
    memory.level -= KEPT
    memory.seconds = 100.0
    assert memory.run_test(fixture_bytes=10, keeps=KEPT, thorough=False, promotes=True)
    assert memory.full_collections == 2


def test_objects_made_in_a_region_without_limits_need_no_full_collection(memory: Memory) -> None:
    """If nothing in a region without limits became old, a young collection finds its garbage."""
    assert kept_by_each_of_three_tests(memory) == [True, True, True]
    assert memory.full_collections == 1


def test_region_with_limits_gets_every_collection_that_it_needs(memory: Memory) -> None:
    """A region with limits gets each collection that it needs,
    also beyond the share of the time.
    """
    kept_by_each_of_three_tests(memory, promotes=True)
    assert memory.run_test(fixture_bytes=10, keeps=KEPT, promotes=True)
    assert memory.full_collections == 2


def test_garbage_that_was_left_is_collected_before_the_next_region_with_limits(
    memory: Memory,
) -> None:
    """A region with limits must start without garbage that a region without limits has left."""
    memory.seconds = 10.0
    memory.run_test(fixture_bytes=10, keeps=KEPT)
    memory.level -= KEPT
    assert not memory.run_test(fixture_bytes=10, keeps=KEPT, thorough=False, promotes=True)
    memory.garbage.note_quiet_moment()
    assert memory.garbage.collect_before()
    assert memory.full_collections == 2
