"""The second meter while an accelerator is measured: the tensors on the host, in torch's allocator.

It counts what a region retains, and no peak: on an emulated device, computing values allocates
temporaries on the host that the user's code would not.
"""

from collections.abc import Sequence

from pytest_cka_memory.core.allocations import Allocation
from pytest_cka_memory.meters.blocks.counter import Counter, counts_cpu, is_intact
from pytest_cka_memory.meters.blocks.other_memory import LentMemory
from pytest_cka_memory.meters.garbage import Garbage


class HostMemory:
    """Blocks of torch's CPU allocator, pinned memory, and what other libraries lend to tensors.

    Serial numbers are those of the native counter, which numbers the allocations of all devices
    together. So a region needs no mark of its own here.
    """

    def __init__(self) -> None:
        self._counter = Counter()
        self._garbage = Garbage(
            lambda: self._counter.figures().level, self._counter.retained_between
        )
        self.lent_memory = LentMemory(self._counter)
        """Counts memory that is lent to tensors, while it is started."""

    def collect_after(self, serial: int, *, thorough: bool) -> bool:
        """Free what is garbage if anything on the host that is newer than `serial` is live.

        Returns:
            False if there may still be garbage: only without `thorough`, to save time.
        """
        return self._garbage.collect_after(
            lambda: self._counter.retained_since(serial), thorough=thorough
        )

    def retained_since(self, serial: int) -> int | None:
        """Return the bytes that were allocated after the allocation `serial` and are live.

        None if allocations are no longer counted, because another tool has replaced the functions
        that count them: the device is still measured.
        """
        return self._counter.retained_since(serial) if is_intact() else None

    def allocations_since(self, serial: int) -> Sequence[Allocation]:
        """Return these allocations, newest first."""
        return self._counter.allocations_since(serial)


def host_memory() -> HostMemory | None:
    """Return the meter; None if torch's CPU allocator cannot be counted in this process."""
    return HostMemory() if counts_cpu() else None
