"""The allocator's levels are read again only if a block was allocated or freed."""

import pytest

from pytest_cka_memory.meters.accelerator import Levels
from pytest_cka_memory.meters.accelerator.by_blocks import LastLevels
from pytest_cka_memory.meters.blocks.counter import State


class ScriptedAllocator:
    """The statistics and the counter of one device; `during` happens while statistics are read."""

    def __init__(self) -> None:
        self.state = State(level=0, reserved=0, peak=0, peak_reserved=0, serial=0)
        self.readings = 0
        self.during: list[int] = []

    def allocate(self, size: int) -> None:
        state = self.state
        self.state = state._replace(level=state.level + size, serial=state.serial + 1)

    def free(self, size: int) -> None:
        self.state = self.state._replace(level=self.state.level - size)

    def figures(self) -> State:
        return self.state

    def levels(self) -> Levels:
        self.readings += 1
        found = Levels(self.state.level, self.state.level, self.readings)
        for size in self.during:
            self.allocate(size)
        return found


@pytest.fixture
def allocator() -> ScriptedAllocator:
    """Return an allocator with one block of 512 bytes."""
    allocator = ScriptedAllocator()
    allocator.allocate(512)
    return allocator


@pytest.fixture
def levels(allocator: ScriptedAllocator) -> LastLevels:
    """Return its levels, not read yet."""
    return LastLevels(allocator, allocator)  # type: ignore[arg-type]


def test_levels_are_read_once_while_no_block_comes_or_goes(allocator, levels) -> None:
    """While no block comes or goes, levels and reserve are those of the first reading."""
    assert levels.known() == levels.known() == Levels(512, 512, 1)
    assert allocator.readings == 1


def test_levels_are_read_again_if_they_are_asked_for_now(allocator, levels) -> None:
    """The reserve may fall without the counter's notice, so levels can be asked for again."""
    levels.known()
    assert levels.read() == levels.known() == Levels(512, 512, 2)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda allocator: allocator.allocate(512), id="allocated"),
        pytest.param(lambda allocator: allocator.free(512), id="freed"),
        pytest.param(
            lambda allocator: (allocator.free(512), allocator.allocate(512)), id="replaced"
        ),
    ],
)
def test_levels_are_read_again_after_a_change(allocator, levels, change) -> None:
    """After a change levels are read again, also if the level is the same as before."""
    levels.known()
    change(allocator)
    assert levels.known() == Levels(allocator.state.level, allocator.state.level, 2)


def test_reading_during_which_another_thread_allocates_is_not_kept(allocator, levels) -> None:
    """A reading in which another thread allocates belongs to neither moment, so it is not kept."""
    allocator.during = [100]
    levels.read()
    allocator.during = []
    assert levels.known() == Levels(612, 612, 2)


def test_new_peak_alone_is_no_change(allocator, levels) -> None:
    """A new peak, which begins at the end of a region, is no change of the levels."""
    levels.known()
    allocator.state = replace_peak(allocator.state)
    levels.known()
    assert allocator.readings == 1


def replace_peak(state: State) -> State:
    """Return the state after a new peak has started."""
    return state._replace(peak=state.level, peak_reserved=state.reserved)
