"""Which collections the garbage between two tests needs: a full one only if it may be old."""

import gc
from collections.abc import Callable, Iterator

import pytest

from pytest_cka_memory.meters.garbage import Garbage

KEPT = 7


class Memory:
    """A level that a test sets, and the full collections that were made."""

    def __init__(self) -> None:
        self.level = 0
        self.full_collections = 0
        self.at_next_collection: Callable[[], None] | None = None
        self.garbage = Garbage(lambda: self.level)

    def run_test(self, *, fixture_bytes: int, keeps: int = 0) -> None:
        """Set up fixtures, open and end a region, tear the fixtures down; `keeps` stays live."""
        self.garbage.note_quiet_moment()
        self.level += fixture_bytes
        self.garbage.collect_before()
        self.level += keeps
        self.garbage.collect_after(lambda: keeps)
        gc.collect(1)  # one of those that allocating objects causes: what is live becomes old
        self.level -= fixture_bytes

    def after_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self.full_collections += info["generation"] == 2
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
    """What a test allocates is gone before the next one, so that nothing old can be garbage."""
    for size in (10, 30, 20):
        memory.run_test(fixture_bytes=size)
    assert memory.full_collections == 0


def test_fixtures_that_become_old_need_one_full_collection_if_their_size_stays(
    memory: Memory,
) -> None:
    """The next test's fixtures are taken for those of the last one."""
    for _ in range(3):
        memory.garbage.note_quiet_moment()
        memory.level += 10
        gc.collect(1)
        memory.garbage.collect_before()
        memory.level -= 10
    assert memory.full_collections == 1


def test_freeing_what_a_test_kept_spares_the_next_test_a_full_collection(memory: Memory) -> None:
    """An attribute of a unittest instance, for example, is freed with the instance."""
    memory.run_test(fixture_bytes=10, keeps=KEPT)
    assert memory.full_collections == 1  # at the end of its region
    memory.level -= KEPT
    memory.run_test(fixture_bytes=30)
    assert memory.full_collections == 1


def test_what_a_test_kept_and_did_not_free_is_collected_before_the_next(memory: Memory) -> None:
    """It may have become garbage in the teardown, and it may be old."""
    memory.run_test(fixture_bytes=10, keeps=KEPT)
    memory.run_test(fixture_bytes=30)
    assert memory.full_collections == 2


def test_old_garbage_that_a_test_left_is_collected_before_the_next(memory: Memory) -> None:
    """Nothing that the level shows is taken for a fixture."""
    memory.run_test(fixture_bytes=10)
    memory.level += KEPT  # freed in the teardown of a fixture, by a cycle that is old
    memory.run_test(fixture_bytes=30)
    assert memory.full_collections == 1


def test_level_between_tests_is_known_again_after_garbage_was_found(memory: Memory) -> None:
    """It is the level that was noted, less the garbage that a collection freed afterwards."""
    memory.run_test(fixture_bytes=10)
    memory.level += KEPT
    memory.at_next_collection = lambda: setattr(memory, "level", memory.level - KEPT)
    memory.run_test(fixture_bytes=10)
    memory.run_test(fixture_bytes=30)
    assert memory.full_collections == 0
