"""Writes the allocator's history of a region, as torch records it."""

from pathlib import Path

from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.measure.region_stack import RegionStack


class WithRecording:
    """A region whose device may record what its allocator does."""

    _stack: RegionStack

    def save_snapshot(self, path: str | Path = "memory_snapshot.pickle") -> Path:
        """Write what torch has recorded of the allocator until now, with the program's lines.

        ``python -m pytest_cka_memory snapshot FILE`` explains the file, and ``replay FILE`` tries
        other settings of the allocator.

        Args:
            path: the file to write.

        Returns:
            The path of the file.

        Raises:
            RegionError: if nothing is being recorded.

        Example:
            .. code-block:: python

                torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
                with cka_memory.measure("step") as region:
                    train(model, batch)
                    region.save_snapshot("step.pickle")
        """
        path = Path(path)
        meter = self._stack.meter
        if not meter.dump_history(path):
            raise RegionError(
                f"cannot write {path}: {meter.device} records no history of allocations; on a CUDA "
                "device run pytest with --cka-memory-snapshots=FOLDER, or call torch.cuda.memory."
                '_record_memory_history(max_entries=1_000_000, stacks="python") first'
            )
        return path
