"""What a region measures in addition to its device's memory, if it is asked for."""

from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

from pytest_cka_memory.core.figure_rows import (
    ADDITIONS,
    CYCLES,
    DRIVER,
    MOMENTS,
    POOLS,
    PROCESS,
    TIMELINE,
)
from pytest_cka_memory.errors import MissingPackageError
from pytest_cka_memory.meters.base import Meter, Peaks

Additions = Collection[str] | Callable[[], Collection[str]]
"""Names of additions, or a function that returns them when a region begins."""

# As text, because most sessions use none of them, and some take long to import.
_CLASSES = {
    CYCLES: ("pytest_cka_memory.measure.block_additions", "Cycles"),
    PROCESS: ("pytest_cka_memory.measure.system", "ProcessMemory"),
    DRIVER: ("pytest_cka_memory.measure.system", "DriverMemory"),
    POOLS: ("pytest_cka_memory.measure.system", "PoolMemory"),
    TIMELINE: ("pytest_cka_memory.measure.block_additions", "Timeline"),
    MOMENTS: ("pytest_cka_memory.measure.law_runs", "Moments"),
}
"""Name of an addition -> module and name of the subclass of :class:`Addition` that measures it."""


class Addition:
    """Base class of the additions, which measures nothing. Each region has objects of its own.

    They must not keep a tensor alive.
    """

    def boundary(self) -> None:
        """Measure at a batch boundary."""

    def look(self, garbage: list[Any] | None, serials: Collection[int] = ()) -> None:
        """Look at objects that are garbage at a batch boundary.

        Args:
            garbage: the objects; None if they are not known: then all garbage is about to be
                collected.
            serials: the numbers of the allocations that only they keep alive.
        """

    def finish(self) -> None:
        """Measure when the region's code has ended without an exception, before cleaning."""

    def close(self) -> None:
        """Stop measuring; called once, also after an exception."""

    def levels(self) -> tuple[str, Mapping[int, int | None]]:
        """Return an attribute of samples, and its value by the number of the batch."""
        return "", {}

    def fields(self) -> dict[str, Any]:
        """Return fields of the region's record, after cleaning."""
        return {}


def checked(names: Iterable[str]) -> Collection[str]:
    """Return `names` in the order of ``ADDITIONS``, each once; ``timeline`` is the last.

    Raises:
        MissingPackageError: if psutil is not installed and the process is to be measured.
        ValueError: if one is not the name of an addition.
    """
    asked_for = [names] if isinstance(names, str) else list(names)
    known = (*ADDITIONS, TIMELINE, MOMENTS)
    unknown = [name for name in asked_for if name not in known]
    if unknown:
        raise ValueError(f"cannot measure {unknown[0]!r}; write one of {', '.join(known)}")
    if PROCESS in asked_for:
        from pytest_cka_memory.meters import process

        if not process.is_available():
            raise MissingPackageError(process.INSTALL)
    return [name for name in known if name in asked_for]


def begin(names: Iterable[str], peaks: Peaks, meter: Meter) -> list[Addition]:
    """Begin to measure the additions of these names, for the region that `peaks` belongs to.

    Raises:
        MissingPackageError: if psutil is not installed and the process is to be measured.
        ValueError: if one of `names` is not the name of an addition.
    """
    classes = [_CLASSES[name] for name in checked(names)]
    return [getattr(import_module(module), name)(peaks, meter) for module, name in classes]
