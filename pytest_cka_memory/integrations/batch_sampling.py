"""Sample a region after each batch, from a callback of a training framework."""

from contextlib import suppress
from typing import Any

from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.measure.loaders_and_steps import size_of
from pytest_cka_memory.measure.region import Region


class BatchSampling:
    """Samples a region after each batch.

    Does nothing after the region has ended, nor while it counts the steps of optimizers instead.
    """

    def __init__(self, region: Region) -> None:
        """Sample `region`.

        Raises:
            TypeError: if it is not a region.
        """
        if not isinstance(region, Region):
            raise TypeError(
                f"MemoryCallback needs a region, not {type(region).__name__}; write: with "
                "cka_memory.measure() as region: ..., MemoryCallback(region)"
            )
        self._region = region

    @property
    def have_ended(self) -> bool:
        """Whether the region has ended, so that nothing is sampled any more."""
        with suppress(RegionError):
            return bool(self._region.record)
        return False

    def sample(self, batch: Any = None, *, size: int | None = None) -> None:
        """Sample after `batch`, or after a batch of `size` items; the batch is not kept."""
        # The trainer may be used after the region, or in a block with region.each_step().
        with suppress(RegionError):
            self._region.batch_done(size_of(batch) if size is None else size)
